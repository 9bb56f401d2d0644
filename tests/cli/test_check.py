"""`penstock check FILE`."""

import io
import json
import sys

import pytest

from penstock.lowering import lower
from penstock.schedules import build

SCHEDULE = build("1f1b", ranks=2, microbatches=3)


@pytest.fixture
def file(tmp_path):
    """Write a text and return the file's name."""

    def write(text):
        path = tmp_path / "plan.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize("plan", [SCHEDULE, lower(SCHEDULE)], ids=["actions", "a program"])
def test_a_right_plan_is_ok_with_its_facts(file, printed, plan):
    for text in (plan.to_csv(), plan.to_json()):
        told = printed("check", file(text), "--ranks", "2")
        assert told.startswith("ok: 2 ranks, 2 stages, 3 microbatches, 12 actions")
        assert "; peak activations per rank 2, 1" in told
        assert told.endswith("; ends under posted\n") == (plan is not SCHEDULE)


OMITTED = "; it omits the reductions of its gradients: whoever runs it must do them; ends under posted\n"


def test_a_program_of_another_system_without_reductions_passes_and_is_told_as_such(file, printed, refused):
    whole = lower(SCHEDULE).to_csv()
    text = whole.replace(",0REDUCE_GRAD", "").replace(",1REDUCE_GRAD", "")

    assert printed("check", file(text)).endswith(f"peak activations per rank 2, 1{OMITTED}")
    assert OMITTED not in printed("check", file(whole))

    table = json.loads(lower(SCHEDULE).to_json())  # which says itself what it omits
    for rank in range(2):
        index = table["ranks"][rank].index(f"{rank}REDUCE_GRAD")
        for key in ("ranks", "peers", "slots"):
            del table[key][rank][index]
    assert refused("check", file(json.dumps(table))).count("is never reduced") == 2
    assert printed("check", file(json.dumps(table | {"omits_reductions": True}))).endswith(OMITTED)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("0SEND_F1,", "", "position"),
        ("0B1", "0F1", "position"),
        (",0REDUCE_GRAD", "", "the last backward of stage 0, whose gradient is never reduced"),
    ],
)
def test_a_program_that_is_wrong_is_refused_with_the_place(file, refused, right, wrong, told):
    text = lower(SCHEDULE).to_csv()
    assert right in text

    assert told in refused("check", file(text.replace(right, wrong)))


def test_a_limit_in_bytes_is_proved_of_the_program_with_costs_of_layers(file, printed, refused, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('per = "layer"\nactivation_kib = [1, 1, 1]\nmessage_bytes = 8\nparameter_mib = [1, 1, 1]\n')
    name = file(SCHEDULE.to_csv())
    static = 2 * 2**20  # two layers on rank 0
    largest = static + 2 * 2 * 2**10 + 2 * 8  # two activations, one message made and one to come

    said = printed("check", name, "--costs", str(costs), "--memory-limit", f"{largest}B")
    assert "; peak bytes per rank 2.00 MiB, 1.00 MiB (not given, counted as 0: " in said
    assert ": forward_workspace_bytes, backward_workspace_bytes, gradient_bytes, optimizer_bytes)" in said
    complaint = refused("check", name, "--costs", str(costs), "--memory-limit", str(largest - 1))
    assert f"needs {largest} bytes alive at once; the limit of rank 0 is {largest - 1}" in complaint
    assert printed("check", name, "--memory-limit", "2 activations")
    assert "rank 0" in refused("check", name, "--memory-limit", "1 activation")


LOOPED = lower(build("looped-bfs", ranks=3, microbatches=1)).to_json()
"""Under groups of messages, the default order of this family hangs."""


def test_a_program_is_proved_under_the_transport_that_is_asked_for(file, printed, refused):
    assert printed("check", file(LOOPED)).endswith("; ends under posted\n")
    assert printed("check", file(LOOPED), "--transport", "pair_fifo").endswith("; ends under pair_fifo\n")
    told = refused("check", file(LOOPED), "--transport", "coalesced")
    assert "rank 1, position 2: 1F0 never ends under the transport coalesced: it waits for the message of" in told
    assert "as it is, the program passes under posted, rendezvous, pair_fifo" in told
    text = printed("check", file(SCHEDULE.to_csv()), "--transport", "all")  # lowered for it
    assert text.endswith("; ends under posted, rendezvous, pair_fifo, coalesced\n")


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (SCHEDULE.to_csv(), ["--memory-limit", "3"], "--memory-limit: 3 is a number of bytes, but there are no costs"),
        (SCHEDULE.to_csv(), ["--ranks", "4"], "is for 2 ranks, not 4; pass --ranks 2"),
        (b"\xff\xfe", [], "byte 0 is not UTF-8"),
        ("0F0,0X0", [], "plan.csv:1:6"),
        (LOOPED, ["--transport", "coalesce"], "Did you mean 'coalesced'"),
    ],
)
def test_what_cannot_be_checked_is_one_message(file, refused, monkeypatch, text, words, told):
    assert told in refused("check", file(text), *words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("0F0,0F\n"))
    assert refused("check", "-").startswith("penstock: <stdin>:1:7: ")
