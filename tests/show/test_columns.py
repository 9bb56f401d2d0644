"""Columns in a page: they come back as they were."""

import gzip
from base64 import b64decode

import numpy as np
import pytest

from penstock.show.columns import ALIGNMENT, pack, tick_for, whole_ticks


def unpack(packed):
    """What the viewer does."""
    data = gzip.decompress(b64decode(packed.text))
    return {
        entry["name"]: np.frombuffer(
            data, np.dtype(entry["type"]).newbyteorder("<"), count=entry["length"], offset=entry["offset"]
        )
        for entry in packed.contents
    }


COLUMNS = {
    "kind": np.array([1, 2, 3], np.uint8),
    "gap": np.array([-5, 7], np.int32),
    "stage": np.array([2**32 - 1], np.uint32),
    "bytes": np.array([1e12, 0.5]),
    "nothing": np.zeros(0, np.int32),
}


def test_columns_come_back():
    found = unpack(pack(COLUMNS))

    assert {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in COLUMNS.items()
    }


def test_columns_begin_where_a_browser_can_look_at_them():
    assert [entry["offset"] % ALIGNMENT for entry in pack(COLUMNS).contents] == [0] * len(COLUMNS)


def test_the_same_columns_give_the_same_text():
    date = b64decode(pack(COLUMNS).text)[4:8]

    assert date == bytes(4)
    assert pack(COLUMNS).text == pack(COLUMNS).text


@pytest.mark.parametrize("end_s", [33.0, 1e-6, 2.147483647, 2.15, 86_400.0])
def test_a_tick_is_a_power_of_ten_that_31_bits_can_count(end_s):
    tick_s = tick_for(end_s)

    assert np.log10(tick_s) == pytest.approx(round(np.log10(tick_s)))
    assert 2**31 / 10 - 1 <= end_s / tick_s < 2**31


def test_no_time_has_a_tick():
    assert tick_for(0.0) == 1.0


def test_times_are_rounded_to_ticks():
    assert whole_ticks(np.array([0.0, 0.3 - 0.1, 0.2]), 0.1).tolist() == [0, 2, 2]
