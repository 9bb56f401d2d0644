"""The doctor finds what a machine lacks."""

import os

import pytest

from penstock.cli import probes


def test_what_is_fine_needs_no_fix():
    findings = [
        probes.examine_python((3, 11)),
        probes.examine_torch("2.13.0+cpu"),
        probes.examine_backends(),
        probes.examine_memory(2**40),
        probes.examine_cores({}),
        probes.examine_loopback("127.0.0.1"),
        probes.examine_hostname("localhost"),
        *probes.examine_extras({"numpy": "none"}),
    ]

    assert [finding.fix for finding in findings] == [""] * len(findings)
    assert probes.examine_cores({"OMP_NUM_THREADS": "9999"}).fix.startswith("set OMP_NUM_THREADS to ")
    assert probes.examine_loopback("127.0.0.1").state == "127.0.0.1 listens, connects and carries 1 byte"
    assert 0 < probes.available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("finding", "fix"),
    [
        (probes.examine_python((3, 10)), "install Python 3.11 or newer"),
        (probes.examine_torch("2.9.1"), "install torch 2.11 or newer"),
        (probes.examine_memory(2**20), "end other programs, or train a smaller model"),
        (probes.examine_cores({"OMP_NUM_THREADS": "many"}), "set OMP_NUM_THREADS to a number, or unset it"),
        (probes.examine_loopback("192.0.2.1"), "bring the loopback interface up: ip link set lo up"),
        (probes.examine_hostname("no-such.invalid"), "add '127.0.0.1 no-such.invalid' to /etc/hosts"),
        (*probes.examine_extras({"no_such_package": "plot"}), "optional: pip install '.[plot]' in Penstock's clone"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.subject,
)
def test_what_is_wrong_says_how_to_fix_it(finding, fix):
    assert finding.fix == fix


def test_free_space_and_permission_are_looked_at(tmp_path, monkeypatch):
    [good] = probes.examine_disks({"disk": str(tmp_path)})
    monkeypatch.setattr(probes, "SMALL_DISK_BYTES", 2**80)
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    [bad] = probes.examine_disks({"disk": str(tmp_path)})

    assert good.fix == ""
    assert good.state.endswith(f"GiB free in {tmp_path}")
    assert bad.fix == "free some space: weights and metrics need it; get the permission to write here"
