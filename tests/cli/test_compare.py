"""`penstock compare`."""

import json

import pytest

from penstock.cli.entry import main
from penstock.schedules import FAMILIES, build

SIZE = ["--ranks", "4", "--microbatches", "8"]


def printed_by(capsys, *arguments, status=0):
    assert main(["compare", *arguments]) == status
    return capsys.readouterr().out


def objects_by(capsys, *arguments, status=0):
    return json.loads(printed_by(capsys, *arguments, "--to", "json", status=status))


def test_schedules_stand_side_by_side_with_equal_work_unless_costs_are_per_action(capsys):
    lines = printed_by(capsys, "zb-h1", "1f1b", "gpipe", *SIZE).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["zb-h1", "27", "27", "0.1111", "0.1111", "4", "4", "48", "*"],
        ["1f1b", "33", "33", "0.2727", "0.2727", "4", "4", "48"],
        ["gpipe", "33", "33", "0.2727", "0.2727", "8", "8", "48"],
    ]
    assert "Equal work: F=1,I=1,W=1 is all that a rank does" in "\n".join(lines)

    _, two = objects_by(capsys, "1f1b", "zbv", *SIZE)
    _, unequal = objects_by(capsys, "1f1b", "zbv", *SIZE, "--per-action")
    assert two["makespan_s"] * (1 - two["bubble_fraction"]) == pytest.approx(24)
    assert unequal["makespan_s"] == 2 * two["makespan_s"]

    whole, split = objects_by(capsys, "1f1b", "zb-h1", *SIZE, "--costs", "F=2,B=4")
    assert whole["makespan_s"] == 66.0
    assert "backward_input_s" in split["error"]
    assert "(I= and W= where costs are a text)" in split["error"]


def test_if_all_refuse_the_status_is_1(capsys, refused):
    assert objects_by(capsys, "1f1b", *SIZE, "--stages-per-rank", "2", status=1)[0]["error"]
    assert "error" in objects_by(capsys, "1f1b", "interleaved-1f1b", *SIZE, "--stages-per-rank", "2")[0]
    assert refused("compare", "1f1b", *SIZE, "--slices", "2") == (
        "penstock: none of these schedules can be compared\n"
        "  1f1b: slices: 1f1b does not cut microbatches, got 2; use 1 slice or a family that does\n"
    )


def test_files_and_functions_are_compared_with_families(capsys, tmp_path):
    file, script = tmp_path / "mine.json", tmp_path / "mine.py"
    file.write_text(build("1f1b", ranks=4, microbatches=8).to_json())
    script.write_text("def one(ranks, microbatches, depth=1):\n    1 // depth\n    yield '0F0 0B0'\n")

    found = objects_by(capsys, "1f1b", str(file), *SIZE, "--function", f"{script}:one:depth=0")

    assert [row["name"] for row in found] == ["1f1b", str(file), f"{script}:one:depth=0"]
    assert {**found[0], "name": ""} == {**found[1], "name": ""}
    assert found[2]["error"] == f"{script}:2: one failed: ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["1f2b", *SIZE], 1, "Did you mean '1f1b'"),
        (["1f1b", *SIZE, "--memory-limit", "4"], 1, "--memory-limit: 4 is a number of bytes, but the costs have no"),
        (["1f1b", *SIZE, "--sweep", "memory_limit=4,8"], 1, "4 is a number of bytes, but the costs have no activation"),
        (SIZE, 2, "give at least one NAME"),
        (["all", "--ranks", "4"], 2, "needs --ranks P and --microbatches M"),
    ],
)
def test_wrong_input_is_one_message(refused, arguments, status, told):
    assert told in refused("compare", *arguments, status=status)


def test_a_sweep_compares_all_sizes_and_marks_the_front(capsys):
    found = objects_by(capsys, "1f1b", "zb-h1", "--ranks", "4", "--sweep", "microbatches=4..8")

    assert [row["name"] for row in found] == [
        "1f1b, 4 microbatches", "zb-h1, 4 microbatches", "1f1b, 8 microbatches", "zb-h1, 8 microbatches",
    ]  # fmt: skip
    assert [row["is_on_front"] for row in found] == [False, False, False, True]
    assert found[2]["makespan_s"] == 33.0


def test_bytes_are_compared_where_costs_have_them(capsys, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("forward_s = 1\nbackward_s = 2\nactivation_gib = 1\nmessage_gib = 0.5\nparameter_gib = 3\n")
    sizes = [*SIZE, "--costs", str(file)]

    found = objects_by(capsys, "1f1b", "gpipe", *sizes, "--memory-limit", "8.5GiB")
    text = printed_by(capsys, "1f1b", "gpipe", *sizes, "--sweep", "memory_limit=8..16 GiB")

    # Parameters, four or eight activations, and messages: one made and one to come, or one made and two to come.
    assert [max(row["peak_bytes"]) / 2**30 for row in found] == [8, 12.5]
    assert [row["fits"] for row in found] == [True, False]
    assert "\nfastest within 8 GiB: 1f1b\nfastest within 16 GiB: 1f1b" in text
    assert text.splitlines()[2].split()[8:10] == ["8.00", "GiB"]


COSTS_OF_REPLICAS = """
forward_s = 1
backward_s = 2
activation_mib = 1
parameter_mib = 64
gradient_mib = 64
optimizer_mib = 128
replica_bandwidth_bytes_per_s = 67108864
"""


@pytest.mark.feature("X3")
def test_replicas_are_compared_by_their_whole_step_and_all_bytes(capsys, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text(COSTS_OF_REPLICAS)
    shape = ["looped-bfs", "--ranks", "1", "--microbatches", "2", "--stages-per-rank", "4", "--costs", str(file)]

    found = objects_by(capsys, *shape, "--data", "2", "--sweep", "shard=none,full", "--sweep", "residency=1,0")

    assert [row["name"] for row in found] == [
        "looped-bfs, shard none",
        "looped-bfs, shard full, 1 stage whole",
        "looped-bfs, shard full, all stages whole",
    ]
    # A rank has 64 MiB of weights in four stages; half of the 16 MiB of one take 1/8 s, there and, for none, back.
    none, one, every = found
    # Reductions follow each other: the last begins when its backward has ended, and those before it are over by then.
    assert (none["makespan_s"], none["step_s"]) == (6.0, 6.25)
    assert (one["gathers"], one["peak_whole"], every["gathers"], every["peak_whole"]) == (7, [1], 4, [4])
    # At first a gather, at the end a reduction; in between six gathers, three of them behind a reduction.
    assert (one["makespan_s"], one["step_s"]) == (6 + 9 * 0.125, 6 + 11 * 0.125)
    assert (every["makespan_s"], every["step_s"]) == (6.0, 6.25)
    mib = [max(row["peak_bytes"]) / 2**20 for row in found]
    # Shards are half of 256 MiB. Beside them are the weights and gradients of one stage of 16 MiB: what is being
    # reduced is gone when the next stage is whole.
    assert mib == [256 + 2, 128 + 2 * 16 + 2, 128 + 4 * 16 + 16 + 2]
    assert [row["is_on_front"] for row in found] == [False, True, True]
    picture = printed_by(capsys, *shape, "--data", "2", "--to", "svg")
    assert "peak memory of a rank, in MiB" in " ".join(picture.split())


def test_the_table_of_replicas_has_steps_gathers_and_whole_stages(capsys):
    costs = ["--costs", "F=1,I=1,W=1,unshard=1,reduce=1"]
    lines = printed_by(capsys, "1f1b", "--ranks", "1", "--microbatches", "2", "--shard", "full", *costs).splitlines()

    assert lines[0].split()[:5] == ["name", "step", "s", "makespan", "s"]
    assert lines[0].split()[-4:] == ["gathers", "whole", "stages", "front"]
    assert lines[2].split() == ["1f1b", "8", "6", "6", "0.0000", "0.0000", "1", "1", "0", "1", "1", "*"]
    free = printed_by(capsys, "1f1b", *SIZE, "--shard", "full")
    assert "note: gathers and reductions take no time, since the costs give none" in free
    assert "note: gathers" not in "\n".join(lines)


def test_all_compares_every_family_that_trains_takes_options_and_keeps_what_is_named_besides(capsys):
    every = objects_by(capsys, "all", *SIZE)
    assert [row["name"] for row in every] == [name for name in FAMILIES if name != "forward-only"]
    assert [row for row in every if "error" in row] == []
    assert {row["name"] for row in every if row["copies"] == 2} == {"dualpipe", "chimera"}

    found = objects_by(capsys, "1f1b:recompute=true", "all:recompute=true", *SIZE, "--slices", "2")
    names = [row["name"] for row in found]
    assert names[:2] == ["1f1b:recompute=true", "sequential:recompute=true"]
    assert len(names) == len(set(names)) == len(every)
    assert [row["name"] for row in found if "error" not in row] == [
        "seq1f1b:recompute=true", "breadth-depth:recompute=true",
    ]  # fmt: skip


def test_what_is_not_in_the_picture_is_told(capsys, tmp_path):
    shape = ["--ranks", "4", "--microbatches", "3", "--to", "html"]

    assert main(["compare", "1f1b", "dualpipe", *shape]) == 0
    printed = capsys.readouterr()
    assert "<!DOCTYPE html>" in printed.out
    assert "not in the picture: dualpipe: microbatches: dualpipe sends half" in printed.err

    assert main(["compare", "dualpipe", *shape, "--output", str(tmp_path / "none.html")]) == 1
    assert "none of these schedules can be compared" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def layer_file(folder, sizes, more=""):
    path = folder / "layers.toml"
    seconds = [1.0] * len(sizes)
    lines = [f"{name}_s = {seconds}" for name in ("forward", "backward_input", "backward_weight")]
    path.write_text("\n".join(['per = "layer"', *lines, f"activation_bytes = {sizes}", more]))
    return str(path)


def test_costs_per_layer_are_split_within_the_limit_of_memory_unless_a_split_is_asked_for(tmp_path, capsys):
    """On rank 0 four microbatches are alive: of two layers 80 bytes, of one 40."""
    words = ["1f1b", "1f1b:recompute=true", *SIZE, "--costs", layer_file(tmp_path, [10] * 8)]

    free = printed_by(capsys, *words)
    within = printed_by(capsys, *words, "--memory-limit", "70")
    (row, recomputed) = objects_by(capsys, *words, "--memory-limit", "70")
    swept = printed_by(capsys, *words, "--sweep", "memory_limit=70,90")

    assert "  split 2,2,2,2, balanced by the costs: 1f1b, 1f1b:recompute=true\n" in free
    assert "\n  split 1,2,3,2, balanced within 70: 1f1b\n" in within
    assert "best that fits: 1f1b:recompute=true, 82 s" in within.splitlines()[-1]
    assert (row["split"], max(row["peak_bytes"]), row["fits"]) == ([1, 2, 3, 2], 60, True)
    assert (recomputed["split"], recomputed["fits"]) == ([2, 2, 2, 2], True)
    assert "fastest within 70: 1f1b:recompute=true" in swept

    costs = ["1f1b", *SIZE, "--costs", layer_file(tmp_path, [10] * 8, "split = [2, 2, 2, 2]"), "--memory-limit", "70"]
    assert "balanced within 70: 1f1b" in printed_by(capsys, *costs)
    (asked,) = objects_by(capsys, *costs, "--split", "2,2,2,2")
    assert (asked["split"], asked["fits"]) == ([2, 2, 2, 2], False)
