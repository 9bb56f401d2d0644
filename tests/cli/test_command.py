"""What a command hands to the parser."""

import dataclasses

import pytest

from penstock.cli.command import Command


def test_a_command_does_not_change():
    command = Command("act", "does something", lambda parser: None, lambda arguments: 0)

    with pytest.raises(dataclasses.FrozenInstanceError):
        command.name = "other"
