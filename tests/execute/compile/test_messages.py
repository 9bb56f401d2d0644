"""A send takes what was left for it, and releases those before it that were used; a receive is only posted."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.compile.messages import compile_receive, compile_send_backward, compile_send_forward
from penstock.execute.values.version_guard import VersionGuard
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, step_for

PROGRAM = lower(build("gpipe", ranks=2, microbatches=3))


def sent(compile_row, text, rank, value, *, at=None):
    said = []
    context = context_of(PROGRAM, rank, said, row_of=None if at is None else lambda peer: at)
    step, row = step_for(context), row_of(PROGRAM, text, rank)
    step.outgoing[PROGRAM.slot[row]] = value
    [bound] = compile_row(context, row)
    bound.call(step)
    assert step.outgoing == [None] * len(step.outgoing)
    return said


def test_outputs_are_sent_under_their_key():
    assert sent(compile_send_forward, "0SEND_F1", 0, VersionGuard.of("outputs")) == [
        ("send_forward", 1, (0, 1, 0), "outputs")
    ]


def test_gradients_are_sent_under_their_key():
    assert sent(compile_send_backward, "1SEND_B1", 1, ["g"]) == [("send_backward", 0, ["g"], (1, 1, 0))]


def test_where_the_peer_says_how_far_it_is_what_it_has_used_is_released():
    used = row_of(PROGRAM, "1F1", 1) - PROGRAM.offsets[1]

    said = sent(compile_send_forward, "0SEND_F2", 0, VersionGuard.of("outputs"), at=used + 1)

    assert said[-1] == ("release", 1, 2)


def test_outputs_that_were_changed_are_not_sent():
    value = torch.ones(1)
    guarded = VersionGuard.of(value)
    value += 1

    with pytest.raises(PipelineError, match="0F1: a tensor of its output was changed in place"):
        sent(compile_send_forward, "0SEND_F1", 0, guarded)


@pytest.mark.parametrize(
    ("text", "rank", "posted"),
    [("1RECV_F0", 1, ("post_forward", 0, (1, 0, 0))), ("0RECV_B0", 0, ("post_backward", 1, (0, 0, 0)))],
)
def test_a_receive_is_posted_under_the_key_of_its_own_stage(text, rank, posted):
    said = []
    context = context_of(PROGRAM, rank, said)
    step, row = step_for(context), row_of(PROGRAM, text, rank)

    [bound] = compile_receive(context, row)
    bound.call(step)

    assert said == [posted]
    assert step.received[PROGRAM.slot[row]] == posted[0]
