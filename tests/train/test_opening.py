"""What the first lines of a run say."""

import sys
from contextlib import closing

from penstock.pipeline import Pipeline
from penstock.tables import NO_SCREEN, Screen
from penstock.train.opening import device_line, opening_lines
from penstock.train.settings.config import config_from_table
from tests.train.local_ranks import on_ranks, small_layers, small_pipeline


def config_of(**sections):
    run = {"folder": "run", "steps": 6, "device": "cpu", "record_step": 0}
    return config_from_table(
        {"run": run, "data": {"corpus": "stdlib"}, "pipeline": {"ranks": 1, "microbatches": 4}} | sections
    )


def lines_of(config=None, note="", screen=NO_SCREEN, **options):
    layers = small_layers()
    with closing(Pipeline(layers, microbatches=4, **options)) as pipeline:
        return list(opening_lines(config or config_of(), layers, 1234, pipeline, note, screen))


def parameters_drawn(split):
    rows = [line.split() for line in split.splitlines()]
    return sum(int(row[3].replace(",", "")) for row in rows if row[0].isdecimal())


def test_the_device_line_names_device_and_precision():
    assert device_line(config_of()) == "1 rank on CPU; precision float32"


def test_the_lines_tell_model_text_and_split():
    summary, split = lines_of()

    assert summary.endswith("parameters, 1,234 tokens to train on, 1f1b on 1 rank, 4 microbatches, 6 steps")
    assert "heaviest: stage 0" in split


def test_the_parameters_of_the_stages_add_up_to_those_of_the_first_line():
    layers = small_layers(tied_head=True)

    def case(transport):
        with closing(small_pipeline(transport, layers, stages_per_rank=2, schedule="interleaved-1f1b")) as pipeline:
            return list(opening_lines(config_of(), layers, 1234, pipeline, "", NO_SCREEN))[:2]

    (summary, on_one), *_ = on_ranks(1, case)
    (_, on_two), *_ = on_ranks(2, case)

    total = summary.split(" parameters")[0]
    assert f"{parameters_drawn(on_one):,}" == total
    assert on_one.endswith("tied on one rank: 512 parameters of stage 0 in stage 1, counted once")
    assert f"{parameters_drawn(on_two) - 512:,}" == total
    assert on_two.endswith(f"512 parameters of stage 0 in stage 3, counted in each\nwithout copies: {total} parameters")


def test_notes_follow_the_split_and_fit_the_terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    recorded = config_of(run={"folder": "run", "record_step": 2})

    *_, note, missing = lines_of(recorded, note="the split uses measured seconds", screen=Screen(40))

    assert note == "the split uses measured seconds"
    assert missing.startswith("note: there will be no picture of step\n2: ")
    assert max(map(len, missing.splitlines())) <= 40


def test_a_type_that_this_cpu_emulates_is_noted(monkeypatch):
    seconds_of = {"torch.float32": 1.0, "torch.bfloat16": 4.0}
    name = "penstock.train.optimizing.precision._product_s"
    monkeypatch.setattr(name, lambda dtype: seconds_of[str(dtype)])

    *_, note = lines_of(config_of(precision={"compute": "bfloat16"}))

    assert note.startswith("note: bfloat16 is slower than float32 on this CPU: 4.0 times")
    assert len(lines_of()) == 2
