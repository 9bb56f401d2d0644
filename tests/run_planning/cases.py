"""A tiny run file, and costs of its layers as if they had been measured."""

import penstock as ps
from penstock.simulation.costs.writing import costs_to_toml

RUN = """\
# a run of ours
[run]
folder = "runs/first"
steps = 4
device = "cpu"
evaluate_batches = 0  # none

[pipeline]
ranks = 2  # two of them
microbatch_size = 2

[model]
width = 16
layers = 4
heads = 2
key_value_heads = 2
hidden = 32

[data]
corpus = "stdlib"

[batch]
size = 8
length = 32
accumulate = 2
"""
NUM_LAYERS = 7
KIB = 1 << 10


def costs(**changes):
    """An embedding, four blocks, a norm and a head."""
    forward = [1e-4, *[4e-3] * 4, 2e-4, 3e-3]
    parameters = [16, *[12] * 4, 1, 16]
    fields = {
        "forward": forward,
        "backward_input": forward,
        "backward_weight": forward,
        "activation_bytes": [16 * KIB, *[200 * KIB] * 4, 16 * KIB, 400 * KIB],
        "message_bytes": 16 * KIB,
        "parameter_bytes": [KIB * number for number in parameters],
        "gradient_bytes": [KIB * number for number in parameters],
        "optimizer_bytes": [2 * KIB * number for number in parameters],
        "bandwidth_bytes_per_s": 1e9,
        "replica_bandwidth_bytes_per_s": 1e9,
    }
    return ps.LayerCosts(**fields | changes)


def write_run(folder, text=RUN):
    """Write the run file and its costs; return their paths."""
    run_file, costs_file = folder / "base.toml", folder / "costs.toml"
    run_file.write_text(text, encoding="utf-8")
    costs_file.write_text(costs_to_toml(costs()), encoding="utf-8")
    return run_file, costs_file


def plan_of(folder, **changes):
    """Plan for the run file on four ranks."""
    run_file, costs_file = write_run(folder)
    options = {"gpus": 4, "memory": "1MiB", "sequence_length": 32, "global_batch": 16, "seconds": 0.0}
    return ps.plan_run(run_file, costs=costs_file, **options | changes)
