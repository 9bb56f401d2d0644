"""What each operation does: one handler per row of `ir.operations`, in one file per operation.

A handler makes the calls of one row, once per program: each wait is a call of its own, then comes the work. It is the
only code that knows what its operation does. `compile/` finds it here and runs it for the rows of a rank.
"""

from collections.abc import Mapping

from penstock.execute.ops.backward import backward, backward_input
from penstock.execute.ops.context import Handler
from penstock.execute.ops.forward import forward
from penstock.execute.ops.messages import receive_backward, receive_forward, send_backward, send_forward
from penstock.execute.ops.offload import offload, reload
from penstock.execute.ops.recompute import recompute
from penstock.execute.ops.reduce import reduce
from penstock.execute.ops.step import optimizer_step
from penstock.execute.ops.tied import reduce_tied
from penstock.execute.ops.unshard import reshard, unshard
from penstock.execute.ops.weight import weight
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
    Op.OFFLOAD: offload,
    Op.RELOAD: reload,
}
