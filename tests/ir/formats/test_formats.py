"""The formats of schedules: a file's name says which."""

from penstock.ir.formats import FORMAT_OF_SUFFIX, READABLE, WITH_COMMUNICATION, WRITABLE


def test_every_format_that_a_suffix_names_can_be_written_and_read():
    assert set(FORMAT_OF_SUFFIX.values()) <= set(READABLE) & set(WRITABLE)
    assert set(WITH_COMMUNICATION) <= set(FORMAT_OF_SUFFIX.values())
