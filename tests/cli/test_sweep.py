"""Sweeps: three forms of values, every combination of sizes, and none that explodes."""

from argparse import Namespace

import pytest

from penstock.cli.sweep import MOST_SCHEDULES, read_sweep, swept_schedules
from penstock.errors import ConfigError
from penstock.lowering import NOT_SHARDED, Sharding
from penstock.proofs import Limit


def arguments(*names, **given):
    keys = ("ranks", "microbatches", "stages_per_rank", "stages", "slices", "memory_limit")
    nothing = dict.fromkeys((*keys, "data", "shard", "residency", "look_ahead"))
    return Namespace(names=list(names), functions=[], options=[], forward_only=False, **nothing | given)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8,16,24", (8, 16, 24)),
        ("8,8", (8,)),
        ("8..64", (8, 16, 32, 64)),
        ("3..20", (3, 6, 12)),
        ("8..32:8", (8, 16, 24, 32)),
        ("2..9:3", (2, 5, 8)),
        ("1..99999999999999999999", tuple(2**power for power in range(67))),
    ],
)
def test_values_are_listed_doubled_or_counted_in_steps(text, values):
    assert read_sweep([f"microbatches={text}"]) == {"microbatches": values}


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("4..16 activations", ["4 activations", "8 activations", "16 activations"]),
        ("10,30GiB", ["10 GiB", "30 GiB"]),
        ("8GiB..16GiB:4GiB", ["8 GiB", "12 GiB", "16 GiB"]),
        ("1000..3000:1000", ["1000", "2000", "3000"]),
    ],
)
def test_the_unit_of_limits_is_that_of_all(text, limits):
    assert read_sweep([f"memory_limit={text}"]) == {"memory_limit": tuple(map(Limit.read, limits))}


FORMS = r"ranks: expected whole numbers from 1, such as 8\.\.64 \(doubled\), 8\.\.64:8"
NO_FORM = ["", "8..", "..8", "8..4", "0..8", "0", "8,", "a", "-1", "8..64:0", "1.5", "8..64..2"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((f"ranks={text}", FORMS) for text in NO_FORM),
        ("ranks", "'ranks' is not of the form KEY=VALUES, such as microbatches="),
        ("ranks=2&ranks=4", "ranks is given twice"),
        ("ranks=1..1000000000000:1", r"1\.\.1000000000000:1 are 1,000,000,000,000 values; at most 300"),
        ("microbatch=8", "'microbatch' cannot be swept; known: ranks, .* Did you mean 'microbatches'"),
        ("memory_limit=4 Gbit", "--sweep: '4 Gbit' has no known unit"),
        ("memory_limit=512MiB..2GiB", r"memory_limit: expected one unit for all values, .*, got '512MiB\.\.2GiB'"),
        ("memory_limit=1.5GiB", r"memory_limit: expected whole numbers from 1, .*, got '1\.5GiB'"),
        ("shard=none,ful", "shard: expected some of none, optimizer, full, such as shard=none,full, got 'ful'"),
        ("residency=-1", "residency: expected whole numbers from 0"),
    ],
)
def test_what_is_no_sweep_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        read_sweep(text.split("&"))


def test_a_command_may_sweep_few_keys():
    assert read_sweep(["memory-limit=4"], ("memory_limit",)) == {"memory_limit": (Limit.read("4"),)}
    with pytest.raises(ConfigError, match=r"'ranks' cannot be swept; known: memory_limit\."):
        read_sweep(["ranks=4"], ("memory_limit",))
    with pytest.raises(ConfigError, match="not of the form KEY=VALUES, such as memory_limit=8GiB"):
        read_sweep(["memory_limit"], ("memory_limit",))


def test_every_schedule_is_wanted_at_every_combination_of_sizes():
    sweep = {"ranks": (2, 4), "microbatches": (1, 8)}

    found = swept_schedules(arguments("1f1b", "gpipe"), sweep)

    assert [wanted.text for wanted in found] == [
        "1f1b, 2 ranks, 1 microbatch",
        "gpipe, 2 ranks, 1 microbatch",
        "1f1b, 2 ranks, 8 microbatches",
        "gpipe, 2 ranks, 8 microbatches",
        "1f1b, 4 ranks, 1 microbatch",
        "gpipe, 4 ranks, 1 microbatch",
        "1f1b, 4 ranks, 8 microbatches",
        "gpipe, 4 ranks, 8 microbatches",
    ]
    schedules = [wanted.make() for wanted in found]
    assert [(schedule.num_ranks, schedule.num_microbatches) for schedule in schedules[::2]] == [
        (2, 1), (2, 8), (4, 1), (4, 8),
    ]  # fmt: skip


def test_ways_to_shard_are_swept_and_what_changes_nothing_is_left_out():
    sweep = read_sweep(["shard=none,optimizer,full", "residency=0,2", "look-ahead=1"])

    found = swept_schedules(arguments("1f1b", ranks=2, microbatches=4, data=8), sweep)

    assert [(wanted.text, wanted.sharding, wanted.replicas) for wanted in found] == [
        ("1f1b, shard none", NOT_SHARDED, 8),
        ("1f1b, shard optimizer, look-ahead 1", Sharding("optimizer"), 8),
        ("1f1b, shard full, all stages whole, look-ahead 1", Sharding("full", None), 8),
        ("1f1b, shard full, 2 stages whole, look-ahead 1", Sharding("full"), 8),
    ]


def test_replicas_are_swept_and_without_a_number_are_those_of_the_costs():
    found = swept_schedules(arguments("1f1b", ranks=2, microbatches=4), read_sweep(["data=1..4"]))
    assert [(wanted.text, wanted.replicas) for wanted in found] == [
        ("1f1b, 1 replica", 1), ("1f1b, 2 replicas", 2), ("1f1b, 4 replicas", 4),
    ]  # fmt: skip

    (found,) = swept_schedules(arguments("1f1b", ranks=2, microbatches=4, shard="full"), {})
    assert (found.sharding, found.replicas) == (Sharding("full"), 0)
    (found,) = swept_schedules(arguments("1f1b", ranks=2, microbatches=4), {})
    assert (found.sharding, found.replicas) == (NOT_SHARDED, None)


def test_a_sweep_that_explodes_or_of_a_size_that_is_given_is_refused_and_limits_make_no_further_schedules():
    sweep = {"ranks": tuple(range(1, 11)), "microbatches": tuple(range(1, 31))}
    assert len(swept_schedules(arguments("1f1b"), sweep)) == MOST_SCHEDULES

    with pytest.raises(ConfigError, match=r"600 schedules to simulate \(10 x 30 sizes of 2\); at most 300"):
        swept_schedules(arguments("1f1b", "gpipe"), sweep)
    with pytest.raises(ConfigError, match="stages_per_rank is swept and given as --stages-per-rank too"):
        swept_schedules(arguments("1f1b", stages_per_rank=2), read_sweep(["stages-per-rank=1,2"]))
    limits = read_sweep(["memory-limit=2,4"])
    assert [wanted.text for wanted in swept_schedules(arguments("1f1b", ranks=2, microbatches=4), limits)] == ["1f1b"]
