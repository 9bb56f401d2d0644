"""`penstock check FILE`."""

import io
import json
import sys

import pytest

from penstock.cli.entry import main
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


@pytest.mark.parametrize("text", [SCHEDULE.to_csv(), SCHEDULE.to_json()], ids=["csv", "json"])
def test_a_right_schedule_is_ok_with_its_facts(file, printed, text):
    assert printed("check", file(text), "--ranks", "2") == (
        "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1\n"
    )


@pytest.mark.parametrize("text", [lower(SCHEDULE).to_csv(), lower(SCHEDULE).to_json()], ids=["csv", "json"])
def test_a_program_with_communication_is_proved_too(file, printed, text):
    assert printed("check", file(text)).startswith("ok: 2 ranks, 2 stages, 3 microbatches, 12 actions, ")


OMITTED = "; it omits the reductions of its gradients: whoever runs it must do them; ends under posted\n"


def test_a_program_of_another_system_without_reductions_passes_and_is_told_as_such(file, printed):
    whole = lower(SCHEDULE).to_csv()
    text = whole.replace(",0REDUCE_GRAD", "").replace(",1REDUCE_GRAD", "")

    assert printed("check", file(text)).endswith(f"peak activations per rank 2, 1{OMITTED}")
    assert OMITTED not in printed("check", file(whole))


def test_a_program_in_json_must_hold_its_reductions(file, printed, refused):
    table = json.loads(lower(SCHEDULE).to_json())
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
        ("1RECV_F0", "1RECV_F1", "position"),
        ("0SEND_F0", "0SEND_F0,0SEND_F0", "position"),
        ("1F2", "1F7", "position"),
        ("0B1", "0F1", "position"),
        (",0REDUCE_GRAD", "", "the last backward of stage 0, whose gradient is never reduced"),
    ],
)
def test_a_program_that_is_wrong_is_refused_with_the_place(file, refused, right, wrong, told):
    text = lower(SCHEDULE).to_csv()
    assert right in text

    assert told in refused("check", file(text.replace(right, wrong)))


def test_slots_of_a_program_in_json_are_proved_as_they_are(file, refused):
    table = json.loads(lower(SCHEDULE).to_json())
    table["slots"] = [[0] * len(slots) for slots in table["slots"]]

    assert "overwrites slot 0" in refused("check", file(json.dumps(table)))


def test_everything_that_is_wrong_is_told(file, refused):
    text = SCHEDULE.to_csv().replace("0B2", "0B1").replace("1F0", "1F1")

    complaint = refused("check", file(text))
    assert "rank 0, position" in complaint
    assert "rank 1, position" in complaint


def test_a_limit_on_memory_is_proved(file, refused):
    name = file(SCHEDULE.to_csv())

    assert main(["check", name, "--memory-limit", "2 activations"]) == 0
    assert "rank 0" in refused("check", name, "--memory-limit", "1 activation")


def test_a_limit_in_bytes_is_proved_of_the_program_with_costs_of_layers(file, printed, refused, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('per = "layer"\nactivation_kib = [1, 1, 1]\nmessage_bytes = 8\nparameter_mib = [1, 1, 1]\n')
    name = file(SCHEDULE.to_csv())
    static = 2 * 2**20  # two layers on rank 0
    largest = static + 2 * 2 * 2**10 + 2 * 8  # two activations, one message made and one to come

    said = printed("check", name, "--costs", str(costs), "--memory-limit", f"{largest}B")
    assert "; peak bytes per rank 2.00 MiB, 1.00 MiB (not given, counted as 0: gradient_bytes, optimizer_bytes)" in said
    complaint = refused("check", name, "--costs", str(costs), "--memory-limit", str(largest - 1))
    assert f"needs {largest} bytes alive at once; the limit of rank 0 is {largest - 1}" in complaint


def test_standard_input_is_read_for_a_dash(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCHEDULE.to_csv()))

    assert main(["check", "-"]) == 0


def test_a_missing_file_is_refused(tmp_path, refused):
    assert "none.csv: cannot be read (No such file or directory)" in refused("check", str(tmp_path / "none.csv"))


LOOPED = lower(build("looped-bfs", ranks=3, microbatches=1)).to_json()
"""Under groups of messages, the default order of this family hangs."""


def test_a_program_is_proved_under_the_transport_that_is_asked_for(file, printed, refused):
    assert printed("check", file(LOOPED)).endswith("; ends under posted\n")
    assert printed("check", file(LOOPED), "--transport", "pair_fifo").endswith("; ends under pair_fifo\n")
    told = refused("check", file(LOOPED), "--transport", "coalesced")
    assert "rank 1, position 2: 1F0 never ends under the transport coalesced: it waits for the message of" in told
    assert "as it is, the program passes under posted, rendezvous, pair_fifo" in told


def test_a_schedule_is_proved_and_lowered_for_the_transport(file, printed):
    text = printed("check", file(SCHEDULE.to_csv()), "--transport", "all")
    assert text.endswith("; ends under posted, rendezvous, pair_fifo, coalesced\n")


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (SCHEDULE.to_csv(), ["--memory-limit", "3"], "--memory-limit: 3 is a number of bytes, but there are no costs"),
        (SCHEDULE.to_csv(), ["--memory-limit", "3 GB"], 'or count: "6 microbatches"'),
        (
            SCHEDULE.to_csv(),
            ["--memory-limit", "3 Gbit"],
            "--memory-limit: '3 Gbit' has no known unit; expected one of",
        ),
        (SCHEDULE.to_csv(), ["--ranks", "4"], "is for 2 ranks, not 4; pass --ranks 2"),
        (b"\xff\xfe", [], "byte 0 is not UTF-8"),
        ("", [], "plan.csv:1:1"),
        ("0F0,0X0", [], "plan.csv:1:6"),
        (LOOPED, ["--transport", "coalesce"], "Did you mean 'coalesced'"),
        (LOOPED, ["--transport", "buffered(2)"], "Use 'rendezvous'"),
    ],
)
def test_what_cannot_be_checked_is_one_message(file, refused, text, words, told):
    assert told in refused("check", file(text), *words)


def test_an_error_in_standard_input_is_named_as_such(monkeypatch, refused):
    monkeypatch.setattr(sys, "stdin", io.StringIO("0F0,0F\n"))

    assert refused("check", "-").startswith("penstock: <stdin>:1:7: ")
