"""Pipelines join what torchrun started by themselves, share the group, and leave nothing behind."""

import socket
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.errors import ConfigError, DeadlineExceeded, PipelineError
from penstock.execute.transport.torchrun import DefaultGroup, Launch, backend_for
from tests.support.page_ranks import free_port, run_script
from tests.support.pages import environment

SET = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BEGIN = """\
import sys

import torch
import torch.distributed as dist

import penstock as ps

torch.manual_seed(0)
layers = [torch.nn.Linear(8, 8) for _ in range(4)]
inputs, target = torch.randn(8, 8), torch.randn(8, 8)


def make(**options):
    return ps.Pipeline(layers, "1f1b", 4, torch.nn.functional.mse_loss, frees_other_stages=False, **options)


def line(*words):
    sys.stdout.write(" ".join(map(str, words)) + chr(10))  # in one piece: the ranks share the output
    sys.stdout.flush()

"""


def run(script, folder, num_ranks=2):
    """Run a script as torchrun does; return its status and its lines, sorted."""
    (folder / "train.py").write_text(BEGIN + textwrap.dedent(script), encoding="utf-8")
    done = run_script(num_ranks, ["train.py"], folder, environment(), 60)
    return done.returncode, sorted(done.stdout.splitlines())


RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (SET, Launch(1, 2, "127.0.0.1", 29500)),
        (SET | RESTARTED, Launch(1, 2, "127.0.0.1", 29500, "3", has_store=True)),
        ({}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SET | {"RANK": ""}, None),
    ],
)
def test_what_a_launcher_sets_is_read_and_without_one_a_process_is_alone(variables, launch):
    assert Launch.read(variables) == launch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "one"}, "RANK: the environment variable is 'one'; expected a whole number. Start every rank with"),
        ({"RANK": "2"}, "RANK: RANK is 2, but WORLD_SIZE is 2; ranks count from 0. Start every rank with torchrun"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT: the environment variable is 'x'; expected a whole number"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: WORLD_SIZE is 2, but MASTER_PORT is not set, so the ranks cannot meet"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR: WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT are "),
    ],
)
def test_variables_that_cannot_be_right_are_named(change, message):
    with pytest.raises(ConfigError) as caught:
        Launch.read(SET | change)

    assert str(caught.value).startswith(message)


def test_the_backend_is_the_one_for_the_device():
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_a_rank_that_does_not_come_is_named_within_the_deadline():
    group, port = DefaultGroup(), free_port()

    with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 0\.\d+ s .*, but ranks \[1, 2\] did not come"):
        group.join(Launch(0, 3, "127.0.0.1", port), torch.device("cpu"), 0.3)
    assert group.enter() is None


SCRIPTS = {
    "pipelines share one group which the last one destroys": (
        ["again True", "both 2 gloo True", "end False", "none False", "one True True"] * 2,
        """
        with make() as pipeline:
            other = make()
            line("both", dist.get_world_size(), dist.get_backend(), pipeline.rank == dist.get_rank())
        dist.barrier()
        line("one", pipeline.step is not None, dist.is_initialized())
        loss = other.step(inputs, target=target).loss
        other.close()
        other.close()
        line("none", dist.is_initialized())
        with make() as again:
            line("again", torch.equal(again.step(inputs, target=target).loss, loss))
        line("end", dist.is_initialized())
        """,
    ),
    "a group of the caller is used and left as it is, and made again if the caller destroys it": (
        ["2", "True", "True 2", "False"] * 2,
        """
        dist.init_process_group("gloo")
        with make() as pipeline:
            line(pipeline.transport.num_ranks)
        line(dist.is_initialized())
        dist.destroy_process_group()
        first = make()
        dist.destroy_process_group()
        second = make()
        first.close()
        line(dist.is_initialized(), second.transport.num_ranks)
        second.close()
        line(dist.is_initialized())
        """,
    ),
    "joining sets nothing but the group, and a pipeline that nobody closes does not hold up the end": (
        ["same", "trained True"] * 2,
        """
        import os
        def look():
            return dict(os.environ), torch.get_num_threads(), torch.get_default_device(), torch.get_default_dtype()
        before = look()
        pipeline = make()
        line("same" if look() == before else look())
        line("trained", pipeline.step(inputs, target=target).loss.item() > 0)
        """,
    ),
    "a rank that has ended is named by those that wait for it": (
        ["rank 1 has ended, the others are in clip_grad_norm_"],
        """
        pipeline = make()
        pipeline.step(inputs, target=target)
        if pipeline.rank == 0:
            try:
                pipeline.clip_grad_norm_(1.0)
            except ps.PeerLost as error:
                line(str(error).partition(" (")[0])
        else:
            import atexit
            atexit._run_exitfuncs()  # as an interpreter does at its end, and a process of these tests does not
        """,
    ),
    "layers are measured before any pipeline, and after a mistake, which destroys the group, the next one joins": (
        ["2", "PartitionError False"] * 2,
        """
        times = ps.measure_layers(layers, (inputs,), num_rounds=1)
        try:
            make(split=[9])
        except ps.PenstockError as error:
            line(type(error).__name__, dist.is_initialized())
        with make(weights=times.weights) as pipeline:
            line(pipeline.transport.num_ranks)
        """,
    ),
}


def test_a_rank_that_cannot_make_the_group_says_where_it_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launch = Launch.read(SET | {"RANK": "0", "MASTER_PORT": str(port)})
        with pytest.raises(
            PipelineError, match=f"rank 0 of 2 could not join the others at 127.0.0.1:{port} within 1 s"
        ):
            DefaultGroup().join(launch, torch.device("cpu"), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("claim", SCRIPTS)
def test_in_a_program_that_torchrun_starts(claim, tmp_path):
    lines, script = SCRIPTS[claim]

    assert run(script, tmp_path) == (0, sorted(lines))


@pytest.mark.slow
def test_a_rank_that_comes_too_late_meets_the_others_when_they_try_again(tmp_path):
    script = """
        import os, time
        late = os.environ["RANK"] == "1"
        if late:
            time.sleep(2)
        for _ in range(1 if late else 20):
            try:
                with make(deadline_s=20 if late else 0.5) as pipeline:
                    break
            except ps.DeadlineExceeded as error:
                line("late")
            except ps.PipelineError as error:
                line("disagree" if "deadline_s" in str(error) else error)
                break
    """

    status, lines = run(script, tmp_path)

    assert (status, set(lines), lines.count("disagree")) == (0, {"late", "disagree"}, 2), lines


def claims(rank, store, **options):
    """Whether one rank that has joined over a store reports an error."""
    group = DefaultGroup()
    group._store, group._launch = store, Launch(rank, 2, "127.0.0.1", 29500, **options)
    return group._claims(None)


def test_the_rank_that_holds_the_store_ends_when_the_others_have_asked_who_reports():
    store = torch.distributed.HashStore()

    with ThreadPoolExecutor() as threads:
        first = threads.submit(claims, 0, store)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.2)
        assert claims(1, store) is False
        assert first.result(timeout=60.0) is True


def test_where_the_launcher_holds_the_store_nobody_waits_for_the_others():
    with ThreadPoolExecutor() as threads:
        first = threads.submit(claims, 0, torch.distributed.HashStore(), has_store=True)
        assert first.result(timeout=60.0) is True
