"""`penstock schedules`."""

from penstock.cli.entry import main
from penstock.schedules import FAMILIES


def test_every_family_is_listed_with_its_options(capsys):
    assert main(["schedules"]) == 0

    printed = capsys.readouterr().out
    for family in FAMILIES.values():
        assert f"{family.name}: {family.summary}\n" in printed
        assert all(f"{name}=" in printed for name in family.options)
