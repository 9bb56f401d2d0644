"""A send takes what was left for it, and releases those before it that were used."""

import sys
from dataclasses import replace

import pytest

import penstock
from penstock.execute.ops import HANDLERS
from penstock.execute.transport import TorchTransport
from penstock.execute.values.version_guard import VersionGuard
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.compiled import context_of, row_of, step_for
from tests.support.local_pipelines import float_task, on_ranks, pipeline_of, step_task
from tests.support.ranks import run_ranks

PROGRAM = lower(build("gpipe", ranks=2, microbatches=3))


def sent(text, rank, value, *, at=None):
    said = []
    context = context_of(PROGRAM, rank, said, row_of=None if at is None else lambda peer: at)
    step, row = step_for(context), row_of(PROGRAM, text, rank)
    step.values[context.keys.result_of(context.rows.source[row])] = value
    [bound] = HANDLERS[PROGRAM.op[row]](context, row)
    bound.call(step)
    assert step.values == {}
    return said


@pytest.mark.parametrize(
    ("text", "rank", "value", "call", "used"),
    [
        ("0SEND_F2", 0, VersionGuard.of("outputs"), ("send_forward", 1, (0, 2, 0), "outputs"), "1F1"),
        ("1SEND_B2", 1, ["g"], ("send_backward", 0, ["g"], (1, 2, 0)), "0B1"),
    ],
    ids=["outputs", "gradients"],
)
def test_a_value_is_sent_under_its_key_and_what_the_peer_says_it_has_used_is_released(text, rank, value, call, used):
    at = row_of(PROGRAM, used, 1 - rank) - PROGRAM.offsets[1 - rank]

    assert sent(text, rank, value) == [call]
    assert sent(text, rank, value, at=at + 1) == [call, ("release", 1 - rank, 2)]


MAX_FRAMES = 6
OWN_FILES = penstock.__path__[0]


def frames_from_the_loop():
    """Count the frames of ours from the loop to the caller of the function that asks; 0 outside of the loop."""
    num_frames, frame = 0, sys._getframe(2)
    while frame is not None:
        num_frames += frame.f_code.co_filename.startswith(OWN_FILES)
        if frame.f_code.co_name == "run_step":
            return num_frames
        frame = frame.f_back
    return 0


class Looking:
    """Passes everything on to a transport or backend, and notes how many frames of ours end in each send of a step."""

    def __init__(self, transport):
        self._transport = transport
        self.seen = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def note(self, num_frames):
        if num_frames:
            self.seen.append(num_frames)

    def post_send(self, *message):
        num_frames = frames_from_the_loop()
        self.note(num_frames and num_frames + 1)  # both ends count
        return self._transport.post_send(*message)

    def send(self, *message):
        self.note(frames_from_the_loop())
        return self._transport.send(*message)


def frames_of_sends(transport, looking):
    """Return how many frames of ours end in each send of a second step, which has no headers."""
    task = float_task(4)
    with pipeline_of(transport, task, "1f1b", 2) as pipeline:
        step_task(pipeline, task)
        looking.seen.clear()
        step_task(pipeline, task)
    return looking.seen


def over_gloo(rank):
    transport = TorchTransport(deadline_s=30.0, is_direct=False)
    link = Looking(transport._backends[0])
    for key, found in transport._links.items():
        transport._links[key] = replace(found, outgoing=link)
    return frames_of_sends(transport, link)


@pytest.mark.parametrize("is_over_gloo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_send_is_a_few_frames_from_the_loop(is_over_gloo):
    if is_over_gloo:
        seen_by_ranks = run_ranks(2, over_gloo)
    else:
        seen_by_ranks = on_ranks(2, lambda wires: frames_of_sends(looking := Looking(wires), looking))

    for seen in seen_by_ranks:
        assert len(seen) == 2
        assert max(seen) <= MAX_FRAMES
