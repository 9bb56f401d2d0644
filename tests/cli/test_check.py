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
def test_a_right_schedule_is_ok_with_its_facts(file, capsys, text):
    assert main(["check", file(text), "--ranks", "2"]) == 0
    assert capsys.readouterr().out == (
        "ok: 2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1\n"
    )


@pytest.mark.parametrize("text", [lower(SCHEDULE).to_csv(), lower(SCHEDULE).to_json()], ids=["csv", "json"])
def test_a_program_with_communication_is_proved_too(file, capsys, text):
    assert main(["check", file(text)]) == 0
    assert capsys.readouterr().out.startswith("ok: 2 ranks, 2 stages, 3 microbatches, 12 actions, ")


OMITTED = "; it omits the reductions of its gradients: whoever runs it must do them; ends under posted\n"


def test_a_program_of_another_system_without_reductions_passes_and_is_told_as_such(file, capsys):
    whole = lower(SCHEDULE).to_csv()
    text = whole.replace(",0REDUCE_GRAD", "").replace(",1REDUCE_GRAD", "")

    assert main(["check", file(text)]) == 0
    assert capsys.readouterr().out.endswith(f"peak activations per rank 2, 1{OMITTED}")
    assert main(["check", file(whole)]) == 0
    assert OMITTED not in capsys.readouterr().out


def test_a_program_that_reduces_some_stages_only_is_refused(file, capsys):
    assert main(["check", file(lower(SCHEDULE).to_csv().replace(",0REDUCE_GRAD", ""))]) == 1
    assert "the last backward of stage 0, whose gradient is never reduced" in capsys.readouterr().err


def test_a_program_in_json_must_hold_its_reductions(file, capsys):
    table = json.loads(lower(SCHEDULE).to_json())
    for rank in range(2):
        index = table["ranks"][rank].index(f"{rank}REDUCE_GRAD")
        for key in ("ranks", "peers", "slots"):
            del table[key][rank][index]

    assert main(["check", file(json.dumps(table))]) == 1
    assert capsys.readouterr().err.count("is never reduced") == 2
    assert main(["check", file(json.dumps(table | {"omits_reductions": True}))]) == 0
    assert capsys.readouterr().out.endswith(OMITTED)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("0SEND_F1,", ""), ("1RECV_F0", "1RECV_F1"), ("0SEND_F0", "0SEND_F0,0SEND_F0"), ("1F2", "1F7"), ("0B1", "0F1")],
)
def test_a_program_that_is_wrong_is_refused_with_the_place(file, capsys, right, wrong):
    text = lower(SCHEDULE).to_csv()
    assert right in text

    assert main(["check", file(text.replace(right, wrong))]) == 1
    assert "position" in capsys.readouterr().err


def test_slots_of_a_program_in_json_are_proved_as_they_are(file, capsys):
    table = json.loads(lower(SCHEDULE).to_json())
    table["slots"] = [[0] * len(slots) for slots in table["slots"]]

    assert main(["check", file(json.dumps(table))]) == 1
    assert "overwrites slot 0" in capsys.readouterr().err


def test_everything_that_is_wrong_is_told(file, capsys):
    text = SCHEDULE.to_csv().replace("0B2", "0B1").replace("1F0", "1F1")

    assert main(["check", file(text)]) == 1
    complaint = capsys.readouterr().err
    assert "rank 0, position" in complaint
    assert "rank 1, position" in complaint


def test_a_limit_on_memory_is_proved(file, capsys):
    name = file(SCHEDULE.to_csv())

    assert main(["check", name, "--memory-limit", "2 activations"]) == 0
    assert main(["check", name, "--memory-limit", "1 activation"]) == 1
    assert "rank 0" in capsys.readouterr().err


def test_a_limit_in_bytes_is_proved_of_the_program_with_costs_of_layers(file, capsys, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('per = "layer"\nactivation_kib = [1, 1, 1]\nmessage_bytes = 8\nparameter_mib = [1, 1, 1]\n')
    name = file(SCHEDULE.to_csv())
    static = 2 * 2**20  # two layers on rank 0
    largest = static + 2 * 2 * 2**10 + 2 * 8  # two activations, one message made and one to come

    assert main(["check", name, "--costs", str(costs), "--memory-limit", f"{largest}B"]) == 0
    said = capsys.readouterr().out
    assert "; peak bytes per rank 2.00 MiB, 1.00 MiB (not given, counted as 0: gradient_bytes, optimizer_bytes)" in said
    assert main(["check", name, "--costs", str(costs), "--memory-limit", str(largest - 1)]) == 1
    assert f"needs {largest} bytes alive at once; the limit of rank 0 is {largest - 1}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("3", "--memory-limit: 3 is a number of bytes, but there are no costs"),
        ("3 GB", 'or count: "6 microbatches"'),
        ("3 Gbit", "--memory-limit: '3 Gbit' has no known unit; expected one of bytes, b, kb"),
    ],
)
def test_a_limit_that_nothing_is_known_of_is_one_message(file, capsys, limit, told):
    assert main(["check", file(SCHEDULE.to_csv()), "--memory-limit", limit]) == 1
    assert told in capsys.readouterr().err


def test_another_number_of_ranks_is_refused(file, capsys):
    assert main(["check", file(SCHEDULE.to_csv()), "--ranks", "4"]) == 1
    assert "is for 2 ranks, not 4; pass --ranks 2" in capsys.readouterr().err


def test_standard_input_is_read_for_a_dash(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCHEDULE.to_csv()))

    assert main(["check", "-"]) == 0


@pytest.mark.parametrize(
    ("text", "told"), [(b"\xff\xfe", "byte 0 is not UTF-8"), ("", "plan.csv:1:1"), ("0F0,0X0", "plan.csv:1:6")]
)
def test_what_is_no_schedule_is_refused_with_its_place(file, capsys, text, told):
    assert main(["check", file(text)]) == 1
    assert told in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.csv")]) == 1
    assert "none.csv: cannot be read (No such file or directory)" in capsys.readouterr().err


LOOPED = lower(build("looped-bfs", ranks=3, microbatches=1)).to_json()
"""Under groups of messages, the default order of this family hangs."""


def test_a_program_is_proved_under_the_transport_that_is_asked_for(file, capsys):
    assert main(["check", file(LOOPED)]) == 0
    assert capsys.readouterr().out.endswith("; ends under posted\n")
    assert main(["check", file(LOOPED), "--transport", "pair_fifo"]) == 0
    assert capsys.readouterr().out.endswith("; ends under pair_fifo\n")
    assert main(["check", file(LOOPED), "--transport", "coalesced"]) == 1
    told = capsys.readouterr().err
    assert "rank 1, position 2: 1F0 never ends under the transport coalesced: it waits for the message of" in told
    assert "as it is, the program passes under posted, rendezvous, pair_fifo" in told


def test_a_schedule_is_proved_and_lowered_for_the_transport(file, capsys):
    assert main(["check", file(SCHEDULE.to_csv()), "--transport", "all"]) == 0
    assert capsys.readouterr().out.endswith("; ends under posted, rendezvous, pair_fifo, coalesced\n")


@pytest.mark.parametrize(
    ("name", "told"), [("coalesce", "Did you mean 'coalesced'"), ("buffered(2)", "Use 'rendezvous'")]
)
def test_an_unknown_transport_is_refused(file, capsys, name, told):
    assert main(["check", file(LOOPED), "--transport", name]) == 1
    assert told in capsys.readouterr().err


def test_an_error_in_standard_input_is_named_as_such(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("0F0,0F\n"))

    assert main(["check", "-"]) == 1
    assert capsys.readouterr().err.startswith("penstock: <stdin>:1:7: ")
