import pytest

from penstock.errors import ConfigError, FormatError
from penstock.ir.grid import to_grid
from penstock.ir.reading import read_schedule, read_table
from penstock.lower import assign_slots, lower
from penstock.schedules import build

SCHEDULE = build("1f1b", ranks=3, microbatches=4)


@pytest.mark.parametrize(
    "text",
    [SCHEDULE.to_csv(), SCHEDULE.to_json(), to_grid(SCHEDULE), to_grid(SCHEDULE, timed=False)],
    ids=["csv", "json", "grid", "plain grid"],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_every_format_of_a_schedule_is_told_by_its_content(text, mark):
    assert read_table(mark + text) == SCHEDULE


def test_both_formats_of_a_program_are_told_by_their_content():
    program = lower(SCHEDULE, tied_groups=[(0, 2)], optimizer_step=True)

    assert read_table(program.to_json()) == program
    assert assign_slots(read_table(program.to_csv())) == program


def test_a_schedule_file_gives_the_schedule_its_name(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(SCHEDULE.to_csv())

    schedule = read_schedule(path)

    assert schedule == SCHEDULE
    assert schedule.name == "mine"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        read_schedule(tmp_path / "nowhere.csv")


def test_a_program_is_no_schedule_file(tmp_path):
    path = tmp_path / "program.csv"
    path.write_text(lower(SCHEDULE).to_csv())

    with pytest.raises(FormatError, match=r"program\.csv.*program with communication"):
        read_schedule(path)
