"""Failures while a device waits: named on every rank, in time, and the next step is right."""

import re

import pytest

from tests.emulated.failing_steps import Failing, train_around_a_failure

pytestmark = pytest.mark.emulated


def run(emulated, failing, policy="lazy", seed=0, *, device="emu"):
    options = {"num_ranks": failing.num_ranks, "policy": policy, "seed": seed, "timeout_s": 60}
    return emulated.run(train_around_a_failure, failing, device, **options)


def expect_named(found, culprit):
    assert [ended.blamed for ended in found] == [culprit] * len(found), [ended.text for ended in found]


def expect_right_steps_around(emulated, found):
    expect_equal_steps(found, run(emulated, Failing(None), device="cpu"))


def expect_equal_steps(found, expected):
    assert [ended.losses for ended in found] == [ended.losses for ended in expected]
    assert [ended.weights for ended in found] == [ended.weights for ended in expected]


@pytest.mark.feature("D8")
@pytest.mark.parametrize(
    ("place", "run_ahead", "policy", "seed"),
    [
        ("forward", None, "lazy", 0),
        ("backward", 2, "random", 3),
        pytest.param("forward", 2, "random", 3, marks=pytest.mark.slow),
        pytest.param("backward", None, "random", 3, marks=pytest.mark.slow),
        pytest.param("backward", 2, "lazy", 0, marks=pytest.mark.slow),
    ],
)
def test_a_layer_that_raises_is_named_and_the_next_step_is_right(emulated, run_ahead, place, policy, seed):
    failing = Failing("raises", place, run_ahead=run_ahead)

    found = run(emulated, failing, policy, seed)

    expect_named(found, 1)
    assert "the layer of the test" in found[1].text
    expect_right_steps_around(emulated, found)


@pytest.mark.feature("C1")
@pytest.mark.parametrize(
    ("kind", "culprit", "messages"),
    [
        ("raises", 1, "coalesced"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("late", 1, "coalesced"), ("late", 2, "coalesced"), ("raises", 1, "rendezvous")]
        ),
    ],
)
def test_a_failure_between_groups_is_named_and_the_next_step_is_right(emulated, kind, culprit, messages):
    """A group ends as a whole, so a rank may wait for a message of one peer since another one is late."""
    failing = Failing(kind, "backward", culprit=culprit, messages=messages)

    found = run(emulated, failing)

    expect_named(found, culprit)
    expect_right_steps_around(emulated, found)


@pytest.mark.feature("X6")
@pytest.mark.slow
def test_ranks_of_other_hosts_name_by_their_deadline_whom_ranks_on_cpus_name(emulated):
    """Nobody sees a board, and to abort a communicator wakes nobody at its other end.

    Each names the rank that it waits for; rank 2, at the end of its step, may wait for either of the others.
    """
    failing = Failing("raises", "backward", run_ahead=2, are_apart=True)
    on_cpus = run(emulated, failing, device="cpu")

    found = run(emulated, failing)

    assert [ended.blamed for ended in found[:2]] == [ended.blamed for ended in on_cpus[:2]] == [1, 1]
    assert re.search(rf"waited [\d.]+ s for rank {found[2].blamed}\b", found[2].text)
    assert "the layer of the test" in found[1].text
    assert [ended.error for ended in found[:2]] == ["DeadlineExceeded", "PipelineError"]
    assert found[2].error in ("DeadlineExceeded", "PeerLost")  # rank 0 may have left by then
    assert "unknown (other host)" in found[0].text
    expect_equal_steps(found, on_cpus)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "run_ahead"), [("forward", 2), ("backward", None)])
def test_a_rank_that_is_late_is_named_by_the_deadline_and_a_later_step_is_right(emulated, run_ahead, place):
    failing = Failing("late", place, run_ahead=run_ahead)

    found = run(emulated, failing)

    expect_named(found, 1)
    assert "DeadlineExceeded" in {found[0].error, found[2].error}
    expect_right_steps_around(emulated, found)


@pytest.mark.parametrize("kind", ["late", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_host_that_its_device_blocks_learns_of_a_failed_peer_and_is_let_go_at_the_deadline(emulated, kind):
    """A layer copies to the host, which so waits for a device that waits for a peer."""
    failing = Failing(kind, run_ahead=2, blocks_hosts=True)

    found = run(emulated, failing)

    expect_named(found, 1)
    expect_right_steps_around(emulated, found)


@pytest.mark.parametrize(
    ("place", "run_ahead"), [("backward", 2), pytest.param("forward", None, marks=pytest.mark.slow)]
)
def test_a_kernel_that_fails_on_the_device_is_named(emulated, run_ahead, place):
    """Its device goes on failing, as a GPU does after an assertion, so there is no next step."""
    failing = Failing("kernel", place, run_ahead=run_ahead)

    outcome = emulated.attempt(train_around_a_failure, failing, "emu", num_ranks=3, timeout_s=60)

    expect_named(outcome.results, 1)
    assert "bad kernel" in outcome.results[1].text
    if run_ahead is not None:  # else the host may be anywhere behind the computation
        failed, of_pair = {"forward": "1F2", "backward": "1B2"}[place], r"\d\w\d or \d\w\d"
        named = re.search(f"rank 1, ({of_pair}|{failed}):", outcome.results[1].text)
        assert named is not None, outcome.results[1].text
        assert failed in named[1]
        assert f"in {named[1]} it raised" in outcome.results[0].text
    assert "an assertion on the device" in outcome.results[1].text
