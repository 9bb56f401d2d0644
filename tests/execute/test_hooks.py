"""What reductions and the optimizer step call."""

from penstock.execute.hooks import Hooks, call_of
from penstock.ir.instruction import Instruction, Op


def test_each_instruction_calls_its_hook_with_its_stage_or_group():
    called = []
    hooks = Hooks(
        reduce_stage=lambda stage: called.append(("stage", stage)),
        reduce_tied=lambda group: called.append(("tied", group)),
        optimizer_step=lambda: called.append("step"),
    )

    for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRADIENT, Op.REDUCE_TIED, Op.OPTIMIZER_STEP):
        call_of(Instruction(op, 3, 0, 0, 1, 0), hooks)()

    assert called == [("stage", 3), ("tied", 1), "step"]
