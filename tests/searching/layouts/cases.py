"""Models by their costs alone, on small clusters."""

import penstock as ps
from penstock.searching.layouts.cluster import Cluster, Wire
from penstock.searching.layouts.layout import Choices
from penstock.searching.layouts.problem import LayoutQuestion

MIB = 1 << 20
BLOCK_S = 4e-3


def costs_of(num_blocks=6, head=1.5, **changes):
    """An embedding, equal blocks and a head; full checkpointing keeps the input of a block and runs it again."""

    def costs(size, kind):
        forward = [0.05 * BLOCK_S, *[BLOCK_S] * num_blocks, head * BLOCK_S]
        again = 0.0 if kind == "none" else BLOCK_S
        kept = [1, *[16 if kind == "none" else 1] * num_blocks, 24]
        parameters = [8, *[10] * num_blocks, 8]
        fields = {
            "forward": [size * seconds for seconds in forward],
            "backward_input": [size * (seconds + again * (seconds == BLOCK_S)) for seconds in forward],
            "backward_weight": [0.9 * size * seconds for seconds in forward],
            "activation_bytes": [size * number * MIB for number in kept],
            "weight_context_bytes": [size * number * MIB // 2 for number in kept],
            "message_bytes": size * MIB,
            "parameter_bytes": [2 * number * MIB for number in parameters],
            "gradient_bytes": [4 * number * MIB for number in parameters],
            "optimizer_bytes": [12 * number * MIB for number in parameters],
            "optimizer": [1e-4 * number for number in parameters],
        }
        return ps.LayerCosts(**fields | changes)

    return costs


def question(gpus=4, memory_bytes=2000 * MIB, global_batch=8, nodes=1, *, costs=None, **choices):
    """What layout is best for a small model on a cluster whose nodes are connected by a slow link."""
    cluster = Cluster(
        gpus=gpus,
        nodes=nodes,
        memory_bytes=memory_bytes,
        within=Wire(latency_s=1e-5, bandwidth_bytes_per_s=50e9),
        between=Wire(latency_s=1e-4, bandwidth_bytes_per_s=2e9),
    )
    return LayoutQuestion(
        cluster=cluster,
        costs_of=costs or costs_of(),
        global_batch=global_batch,
        sequence_length=128,
        choices=Choices(**{"microbatch_sizes": (1, 2)} | choices),
    )
