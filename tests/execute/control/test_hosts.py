"""Which processes are known to be on one host."""

import os

import pytest

from penstock.execute.control import hosts
from penstock.execute.control.hosts import BOOT_ID, host_of_clock, host_of_processes


@pytest.fixture(autouse=True)
def looks_again():
    hosts._host.cache_clear()
    yield
    hosts._host.cache_clear()


@pytest.mark.skipif(not BOOT_ID.exists(), reason="the system tells nothing of its boot")
def test_processes_of_one_boot_and_the_same_namespaces_are_on_one_host():
    assert str(os.getpid()) not in f"{host_of_clock()} {host_of_processes()}".split()
    assert host_of_processes().startswith(host_of_clock())


@pytest.mark.parametrize("host", [host_of_clock, host_of_processes])
def test_a_process_that_does_not_know_its_boot_is_on_a_host_of_its_own(monkeypatch, tmp_path, host):
    """Of two containers with one name, each would otherwise take the other's process ids and times for its own."""
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "none")

    assert host().endswith(f" process {os.getpid()}")


@pytest.mark.parametrize(("namespace", "has_another_clock"), [("pid", False), ("time", True)])
def test_a_namespace_of_its_own_is_another_host(monkeypatch, tmp_path, namespace, has_another_clock):
    before = host_of_clock(), host_of_processes()
    for name in ("pid", "time"):
        number = 1 if name == namespace else os.readlink(hosts.NAMESPACES / name)
        (tmp_path / name).symlink_to(f"{name}:[1]" if number == 1 else number)
    monkeypatch.setattr(hosts, "NAMESPACES", tmp_path)
    hosts._host.cache_clear()

    assert (host_of_clock() != before[0], host_of_processes() != before[1]) == (has_another_clock, True)
