"""The operations: one handler per row of `ir.operations`.

A handler makes the calls of one row, once per program: each wait is a call of its own, then comes the work. It is the
only code that knows what its operation does. `compile/` finds it here and runs it for the rows of a rank.
"""

from collections.abc import Mapping

from penstock.execute.ops.barriers import barrier
from penstock.execute.ops.context import Handler
from penstock.execute.ops.data import load
from penstock.execute.ops.messages import receive_backward, receive_forward, send_backward, send_forward
from penstock.execute.ops.parameters import optimizer_step, reduce, reduce_tied, reshard, unshard
from penstock.execute.ops.passes import backward, backward_input, forward, offload, recompute, reload, weight
from penstock.ir.operations import Op

HANDLERS: Mapping[Op, Handler] = {
    Op.FORWARD: forward,
    Op.BACKWARD: backward,
    Op.BACKWARD_INPUT: backward_input,
    Op.BACKWARD_WEIGHT: weight,
    Op.RECOMPUTE: recompute,
    Op.SEND_FORWARD: send_forward,
    Op.RECEIVE_FORWARD: receive_forward,
    Op.SEND_BACKWARD: send_backward,
    Op.RECEIVE_BACKWARD: receive_backward,
    Op.UNSHARD: unshard,
    Op.RESHARD: reshard,
    Op.REDUCE_GRADIENT: reduce,
    Op.REDUCE_TIED: reduce_tied,
    Op.OPTIMIZER_STEP: optimizer_step,
    Op.BARRIER: barrier,
    Op.LOAD: load,
    Op.OFFLOAD: offload,
    Op.RELOAD: reload,
}
