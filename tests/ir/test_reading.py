import pytest

from penstock.errors import ConfigError, FormatError
from penstock.ir.formats import READABLE
from penstock.ir.formats.deepspeed import to_deepspeed
from penstock.ir.formats.megatron import to_megatron
from penstock.ir.grid import to_grid
from penstock.ir.reading import format_of, read_file, read_table
from penstock.lowering import assign_slots, lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

SCHEDULE = build("1f1b", ranks=3, microbatches=4)
INTERLEAVED = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
TEXTS = {
    "csv": (SCHEDULE.to_csv(), SCHEDULE),
    "json": (SCHEDULE.to_json(), SCHEDULE),
    "grid": (to_grid(SCHEDULE), SCHEDULE),
    "plain grid": (to_grid(SCHEDULE, timed=False), SCHEDULE),
    "deepspeed": (to_deepspeed(SCHEDULE), SCHEDULE),
    "megatron": (to_megatron(INTERLEAVED), INTERLEAVED),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("before", ["", "\ufeff", " \t"], ids=["", "byte order mark", "blanks"])
def test_every_format_of_a_schedule_is_told_by_its_content(name, before):
    text, schedule = TEXTS[name]

    assert format_of(before + text) == name.split()[-1]
    assert read_table(before + text) == schedule


@pytest.mark.parametrize(
    "text",
    ["rank 0: 0F0 0B0\nrank 1: 1F0, 1B0", "# one, two\n0F0 0B0\n1F0 1B0", "  rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0"],
)
def test_labels_make_a_grid_and_comments_decide_nothing(text):
    assert format_of(text) == "grid"


def test_a_comment_in_csv_is_refused_with_its_line():
    with pytest.raises(FormatError, match=r"^mine:2:1: '# last' is a comment; .* CSV has no comments"):
        read_table("0F0,0B0\n# last\n1F0,1B0", file="mine")


@pytest.mark.parametrize("name", READABLE)
def test_a_format_that_is_given_is_the_one_that_is_read(name):
    text, schedule = TEXTS[name]

    assert read_table(text, format=name) == schedule
    for other in set(READABLE) - {name}:
        with pytest.raises(FormatError, match=r"^plan:\d+:\d+: "):
            read_table(text, file="plan", format=other)


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match=r"format: 'jsn' is none that can be read; known: csv, .* 'json'\?"):
        read_table("{}", format="jsn")


def test_both_formats_of_a_program_are_told_by_their_content():
    program = lower(SCHEDULE, tied_groups=[(0, 2)], optimizer_step=True)

    assert read_table(program.to_json()) == program
    assert assign_slots(read_table(program.to_csv())) == program


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"json"}))
def test_a_schedule_file_gives_the_schedule_its_name(tmp_path, name):
    text, expected = TEXTS[name]
    path = tmp_path / "mine.txt"
    path.write_text(text)

    schedule = read_file(path)

    assert schedule == expected
    assert schedule.name == "mine"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        read_file(tmp_path / "nowhere.csv")


def test_of_a_recorded_step_the_program_is_read_that_ran(tmp_path):
    program = lower(SCHEDULE)
    simulate(program, Costs.uniform()).save(tmp_path / "step.json")

    assert read_file(tmp_path / "step.json") == program
