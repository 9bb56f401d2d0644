"""DeepSpeed's pipeline engine on the CPU over gloo, on the model of bench/peers.py."""

import os
from collections.abc import Callable

from peer_cases import Case, sgd

NEVER = 10**9


def deepspeed_step(case: Case, family: str) -> Callable[[], float | None]:
    """Return one `train_batch`, which is 1F1B and the optimizer's step; every rank knows the loss."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = PipelineModule(
        [case.part(stage, case.num_ranks) for stage in range(case.num_ranks)],
        num_stages=case.num_ranks,
        loss_fn=case.loss,
        partition_method="uniform",
    )
    config = {
        "train_batch_size": case.num_microbatches * case.rows,
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.num_microbatches,
        "gradient_clipping": 0.0,  # not none by default
        "steps_per_print": NEVER,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd(list(module.parameters())), config=config)
    microbatches = case.microbatches()
    return lambda: float(engine.train_batch(data_iter=iter(microbatches)))
