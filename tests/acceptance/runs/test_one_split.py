"""`compare`, `doctor` and the run that was measured split the layers alike, so they agree on what each family takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.entry import main
from penstock.ir.measured import Prologue
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import LayerCosts, simulate
from penstock.simulation.costs.file import read_costs
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.simulation.costs.writing import costs_to_toml
from penstock.train.folder.run_folder import RunFolder
from penstock.train.profiling import with_parts
from penstock.train.settings.config import config_from_table

MODEL = LayerCosts(  # an embedding, five blocks of different work, and a head whose weight gradient is heavy
    forward=[0.001, 0.020, 0.021, 0.035, 0.020, 0.020, 0.015],
    split_forward=[0.001, 0.022, 0.023, 0.038, 0.022, 0.022, 0.016],
    backward=[0.003, 0.041, 0.043, 0.066, 0.041, 0.040, 0.035],
    backward_input=[0.000, 0.026, 0.027, 0.046, 0.026, 0.026, 0.015],
    backward_weight=[0.003, 0.019, 0.020, 0.027, 0.019, 0.018, 0.022],
    message_bytes=1000,
    latency_s=0.0004,
    launch_s=0.0001,
)
UNEVEN_SPLITS = {2: (3, 4), 4: (1, 2, 2, 2)}


@pytest.fixture(params=UNEVEN_SPLITS, ids="{} ranks".format)
def run(request, tmp_path):
    """A run folder with a recorded step and a profile, as if MODEL had been measured in both."""
    ranks, split = request.param, UNEVEN_SPLITS[request.param]
    schedule = build("1f1b", ranks=ranks, microbatches=8)
    played = simulate(lower(schedule), MODEL.of_stages(split))
    measured = Timeline(played.program, "measured", played.start_s, played.end_s)
    in_parts = simulate(lower(build("zb-h1", ranks=ranks, microbatches=8)), MODEL.of_stages(split))
    ends = [sum(split[: stage + 1]) for stage in range(ranks)]
    layers_of_stage = tuple(range(end - count, end) for end, count in zip(ends, split, strict=True))
    sizes = (1000,) * ranks
    costs = with_parts(
        costs_from_timelines([measured], message_bytes=sizes), costs_from_timelines([in_parts], message_bytes=sizes)
    )
    profiled = LayerCosts.from_stages(costs, layers_of_stage, MODEL.forward, MODEL.backward)
    step = replace(
        measured,
        step=20,
        message_bytes=sizes,
        layers_of_stage=layers_of_stage,
        layer_weights=(1.0,) * 7,
        prologues=(Prologue(0.0, 0.0, 0.0),) * ranks,
    )
    config = config_from_table(
        {
            "run": {"folder": str(tmp_path)},
            "data": {"corpus": "stdlib"},
            "pipeline": {"ranks": ranks, "microbatches": 8},
            "model": {"layers": 4},
            "batch": {"size": 16},
        }
    )
    RunFolder(tmp_path).begin(config)
    RunFolder(tmp_path).write("timeline.json", step.to_json().encode())
    RunFolder(tmp_path).write("costs.toml", costs_to_toml(profiled).encode())
    return tmp_path, measured, split


def printed(capsys, *words):
    assert main([*words, "--to", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def compared(capsys, folder, ranks, *names):
    size = ["--ranks", str(ranks), "--microbatches", "8"]
    rows = printed(capsys, "compare", *names, *size, "--costs", str(folder / "costs.toml"))
    return {row["name"]: row for row in rows if "error" not in row}


def test_compare_doctor_and_the_run_agree_on_its_makespan(run, capsys):
    folder, measured, split = run
    ranks = len(split)

    costs = read_costs(Path(folder / "costs.toml"))
    of_compare = compared(capsys, folder, ranks, "1f1b")["1f1b"]
    of_doctor = printed(capsys, "doctor", str(folder))

    assert costs.split == split
    assert (tuple(of_compare["split"]), tuple(of_doctor["split"])) == (split, split)
    assert simulate(measured.program, costs.of_stages(split)).makespan_s == pytest.approx(measured.makespan_s, rel=0.02)
    assert of_compare["makespan_s"] == pytest.approx(measured.makespan_s, rel=0.02)
    assert of_doctor["predicted"]["makespan_s"] == pytest.approx(of_compare["makespan_s"], rel=0.005)


def test_compare_and_doctor_agree_on_what_each_family_gains(run, capsys):
    folder, _, split = run
    names = ["gpipe", "zb-h1", "zb-h2", "chimera", "dualpipe", "zbv", "interleaved-1f1b", "hanayo", "v-half", "v-min"]

    rows = compared(capsys, folder, len(split), "1f1b", *names)
    changes = printed(capsys, "doctor", str(folder))["changes"]

    gains = {change["change"].partition(",")[0]: change["step_change"] for change in changes}
    now_s = rows.pop("1f1b")["makespan_s"]
    shared = rows.keys() & gains.keys()
    assert len(shared) >= (8 if len(split) == 2 else 4)
    expected = {name: rows[name]["makespan_s"] / now_s - 1 for name in shared}
    assert {name: gains[name] for name in shared} == pytest.approx(expected, abs=0.005)
    assert max(map(abs, expected.values())) > 0.05
