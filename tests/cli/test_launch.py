"""The launcher: ranks meet on loopback only, end when told to, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.cli import launch
from penstock.cli.failure import RankFailure, first_cause
from penstock.errors import ConfigError, PeerLost
from penstock.train import devices
from tests.cli.processes import (
    LONGEST_S,
    LOOPBACK,
    PATIENT_S,
    is_alive,
    listening_addresses,
    stop,
    wait_until,
    written_pids,
)

STUB_RANK = str(Path(__file__).with_name("stub_rank.py"))
STUB_LAUNCHER = str(Path(__file__).with_name("stub_launcher.py"))


def launch_stub(mode, folder, *, num_ranks=2):
    return launch.launch_ranks([sys.executable, STUB_RANK, mode, str(folder)], num_ranks=num_ranks)


def start_launcher(mode, tmp_path, *, num_ranks=2):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "ranks").mkdir()
    return subprocess.Popen(
        [sys.executable, STUB_LAUNCHER, mode, str(tmp_path / "ranks"), str(num_ranks)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_ctrl_c_ends_ranks_that_listen_on_loopback_only_and_leaves_nothing(tmp_path):
    launcher = start_launcher("hang", tmp_path)
    ranks = written_pids(tmp_path / "ranks", 2)
    listening = listening_addresses([launcher.pid, *ranks])

    launcher.send_signal(signal.SIGINT)
    printed, _ = launcher.communicate(timeout=LONGEST_S)

    assert (launcher.returncode, printed) == (130, "")
    assert {address for address, _ in listening} == {LOOPBACK}
    assert not any(is_alive(process) for process in ranks)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (tmp_path / "ranks" / "0").read_text().split()[1:] == ["2", "1"], "the ranks met, with one thread each"
    for _, port in listening:
        assert socket.socket().connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    launcher = start_launcher("light", tmp_path)
    ranks = written_pids(tmp_path / "ranks", 2)

    launcher.kill()
    launcher.wait()

    wait_until(lambda: not any(is_alive(process) for process in ranks))


@pytest.mark.slow
def test_terminating_the_launcher_ends_a_stopped_rank_too(tmp_path):
    launcher = start_launcher("light", tmp_path)
    ranks = written_pids(tmp_path / "ranks", 2)
    stop(ranks[1])

    launcher.terminate()
    printed, _ = launcher.communicate(timeout=PATIENT_S)

    assert (launcher.returncode, printed) == (130, "")
    wait_until(lambda: not any(is_alive(process) for process in ranks))


class Interrupting:
    """An object that interrupts this process when it is finalized, where Python throws away whatever is raised."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


class InterruptedAgent(launch.LocalElasticAgent):
    """A launcher that is interrupted in a finalizer, before it starts its ranks."""

    def _start_workers(self, worker_group):
        Interrupting()
        return super()._start_workers(worker_group)


def test_an_interrupt_within_a_finalizer_ends_the_ranks_that_are_started_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LocalElasticAgent", InterruptedAgent)

    with pytest.raises(KeyboardInterrupt):
        launch_stub("light", tmp_path)

    assert not any(is_alive(int(pid.read_text())) for pid in tmp_path.iterdir())


@pytest.mark.slow
def test_a_stopped_rank_does_not_hold_up_the_end_after_another_failed(tmp_path):
    begin_s = time.monotonic()

    failure = launch_stub("stopped", tmp_path)

    assert time.monotonic() - begin_s < PATIENT_S
    assert failure.status == 4


def handlers_of_interrupts():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_environment_and_handlers_are_as_before_after_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    before, handlers = dict(os.environ), handlers_of_interrupts()

    failure = launch_stub("silent", tmp_path)

    assert failure.message == "rank 0 ended with status 3 and left no message"
    assert dict(os.environ) == before
    assert handlers_of_interrupts() == handlers
    program = f"import sys; open({str(tmp_path / 'seen')!r}, 'w').write(sys.argv[1])"
    launch.launch_ranks([sys.executable, "-c", program, "a=$$ ${local_rank} b"], num_ranks=1)
    assert (tmp_path / "seen").read_text() == "a=$$ ${local_rank} b", "arguments reach the rank as they are"


def test_a_taken_and_an_impossible_port_are_refused_with_a_fix():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen .* Give another port"):
            launch.LoopbackRendezvous(port)
    with pytest.raises(ConfigError, match="--port 70000"):
        launch.LoopbackRendezvous(70000)


def environment_of(rank, world_size, port, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **more,
    }


def test_a_rank_of_a_later_attempt_meets_under_its_prefix():
    rendezvous = launch.LoopbackRendezvous()

    launch.join_ranks(environment_of(0, 1, rendezvous.port, TORCHELASTIC_RESTART_COUNT="3"), timeout_s=LONGEST_S)
    dist.destroy_process_group()

    keys = rendezvous.store.list_keys()
    assert keys
    assert all(key.startswith("attempt3/") for key in keys), keys


def test_a_rank_that_meets_nobody_says_whom_it_looked_for_and_is_not_the_cause_where_another_was_killed():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

    told = rf"rank 1 of 2 could not meet the others at 127.0.0.1:{port} within 0 s"
    with pytest.raises(PeerLost, match=told) as lost:
        launch.join_ranks(environment_of(1, 2, port), timeout_s=0.1)

    failures = [RankFailure.of(lost.value, 1, str(lost.value))]
    assert first_cause({0: -signal.SIGKILL, 1: 4}, failures).rank == 0


def test_ranks_without_a_gpu_each_and_variables_that_are_no_numbers_are_refused_before_they_meet(monkeypatch):
    """No store is there to meet at, so that anything later would fail otherwise."""
    monkeypatch.setattr(devices, "look", lambda: devices.Machine("cuda", 1, has_backend=True))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}

    with pytest.raises(ConfigError, match="2 ranks on a machine with 1 GPU") as caught:
        launch.join_ranks(environment)

    assert caught.value.key == "run.device"
    for text in ("two", "-1"):
        with pytest.raises(ConfigError, match="environment variable WORLD_SIZE"):
            launch.join_ranks({"RANK": "0", "WORLD_SIZE": text})
