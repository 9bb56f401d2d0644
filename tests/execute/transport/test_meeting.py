"""Ranks that meet with different devices, ways of messages or meshes are told which rank is which."""

import pytest

from penstock.errors import ConfigError
from penstock.execute.transport.meeting import IN_GROUPS, require_one_kind


@pytest.mark.parametrize("kinds", [["cpu", "cpu"], [f"emu{IN_GROUPS}"] * 3, ["mesh", "mesh"]])
def test_ranks_of_one_kind_meet(kinds):
    require_one_kind(kinds)


@pytest.mark.parametrize(
    ("kinds", "key", "told"),
    [
        (["cpu", "emu"], "device", "rank 0 on cpu, rank 1 on emu; give all ranks one kind"),
        (["emu", f"emu{IN_GROUPS}"], "messages", "rank 1 launches messages in groups, rank 0 does not"),
        (["cpu", "mesh"], "mesh", "rank 1 was given a mesh, rank 0 none"),
    ],
)
def test_other_ranks_are_refused_with_what_differs(kinds, key, told):
    with pytest.raises(ConfigError, match=told) as error:
        require_one_kind(kinds)

    assert error.value.key == key
