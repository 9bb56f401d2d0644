"""Messages that a rank launches together: counts, the batches of other systems, and what runs."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.operations import IS_COMPUTE, IS_MESSAGE
from penstock.lowering import coalesce_messages, lower, post_receives_late
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.proofs.machine import verdict
from tests.schedules.golden import cases, sizes


def batches(program, rank):
    """One text of a rank's computations and launches: `[1RECV_F3@0;1SEND_B0@0]` are two messages launched together."""
    words, last = [], 0
    for row in range(*program.offsets[rank : rank + 2].tolist()):
        group, text = int(program.group[row]), str(program.row(row))
        if IS_MESSAGE[program.op[row]]:
            text = f"{text}@{program.placement.rank_of_stage[program.peer[row]]}"
            if group and group == last:
                words[-1].append(text)
            else:
                words.append([text])
        elif IS_COMPUTE[program.op[row]]:
            words.append(text)
        last = group
    return " ".join(word if isinstance(word, str) else f"[{';'.join(sorted(word))}]" for word in words)


@pytest.mark.feature("C1")
def test_a_middle_rank_of_1f1b_launches_17_batches_for_32_messages():
    program = coalesce_messages(lower(build("1f1b", ranks=4, microbatches=8), "coalesced"))

    words = batches(program, 1).split()

    assert len([word for word in words if word[0] == "["]) == 17
    assert sum(word.count("@") for word in words) == 32


@pytest.mark.feature("C3")
@pytest.mark.parametrize("key", cases("batches"))
def test_by_peer_the_batches_of_1f1b_are_those_of_megatron_and_pippy(key):
    ranks, microbatches = sizes(key)["p"], sizes(key)["m"]
    schedule = build(
        "1f1b", ranks=ranks, microbatches=microbatches, warmup="eager" if key.startswith("pippy") else "standard"
    )

    program = coalesce_messages(post_receives_late(lower(schedule, "coalesced")), "peer")

    found = [batches(program, rank) for rank in range(ranks)]
    for rank in range(ranks) if key.startswith("megatron") else ():
        if ranks - rank - 1 >= microbatches:  # without a steady phase, in which alone Megatron-LM has batches
            found[rank] = _one_by_one(found[rank])
    assert found == cases("batches")[key]
    check(program, "coalesced")


def _one_by_one(text):
    """The same messages, a send before a receive, each by itself."""
    words = text.split()
    return " ".join(
        " ".join(f"[{message}]" for message in sorted(word[1:-1].split(";"), key=lambda one: "RECV" in one))
        if word[0] == "["
        else word
        for word in words
    )


@pytest.mark.feature("C4")
def test_by_rank_one_batch_of_an_interleaved_schedule_has_both_neighbours():
    program = coalesce_messages(lower(build("interleaved-1f1b", ranks=4, microbatches=8), "coalesced"))

    peers = [
        {end.split("@")[1] for end in word[1:-1].split(";")} for word in batches(program, 1).split() if "@" in word
    ]

    assert max(map(len, peers)) == 2
    assert max(word.count("@") for word in batches(program, 1).split()) == 4


@pytest.mark.parametrize("by", ["rank", "peer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_groups_of_every_family_end_as_a_plain_machine_says(family, by):
    program = coalesce_messages(lower(build(family, ranks=4, microbatches=8), "coalesced"), by)

    assert check(program, "all").transports
    assert verdict(program, "coalesced") == "ends"
    assert [sorted(map(str, program[rank])) for rank in range(4)] == [
        sorted(map(str, order)) for order in lower(build(family, ranks=4, microbatches=8))
    ]


def test_messages_are_grouped_by_rank_or_by_peer_alone():
    with pytest.raises(ConfigError, match=r"^by: 'stage' of type str; expected one of peer, rank"):
        coalesce_messages(lower(build("1f1b", ranks=2, microbatches=2), "coalesced"), "stage")
