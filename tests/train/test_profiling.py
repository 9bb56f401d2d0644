"""A profile measures what the run costs, and changes nothing."""

import numpy as np
import pytest
import torch

from penstock.lowering import lower
from penstock.planning import stage_costs
from penstock.schedules import build
from penstock.simulation import simulate
from penstock.simulation.costs.file import costs_from_toml
from penstock.simulation.costs.writing import costs_to_toml
from penstock.train.data.dataset import BatchOptions, TokenDataset
from penstock.train.data.sequences import Source
from penstock.train.profiling import NUM_WARM_UP_STEPS, profile_pipeline, profile_run
from penstock.train.settings.config import config_from_table
from tests.train.local_ranks import VOCABULARY, on_small_pipelines
from tests.train.tiny_runs import tiny_table

NUM_STEPS = 3
TABLES_BYTES = 2 * 8 * 4 * 4
"""Of the buffers of a block: cosine and sine of 8 positions and 4 angles, in float32."""


def dataset():
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2000).astype(np.uint16)
    return TokenDataset([Source(tokens, length=8)], BatchOptions(8, 8), vocabulary=VOCABULARY)


def profile(pipeline):
    before = {name: parameter.clone() for name, parameter in pipeline.named_parameters()}
    steps = []
    run = pipeline.profile
    pipeline.profile = lambda *args, **kwargs: (steps.append(kwargs["split_backwards"]), run(*args, **kwargs))[1]
    found = profile_pipeline(pipeline, dataset(), NUM_STEPS)
    parameters = dict(pipeline.named_parameters())
    unchanged = all(torch.equal(parameters[name], value) for name, value in before.items())
    without_gradient = all(parameter.grad is None for parameter in parameters.values())
    sizes = sum(parameter.nbytes for parameter in parameters.values())
    return found, steps, unchanged and without_gradient, sizes


@pytest.fixture(scope="module")
def profiled():
    return on_small_pipelines(2, profile)


def test_a_profile_is_equal_on_all_ranks_and_changes_no_weight_by_whole_backwards_and_then_their_parts(profiled):
    (first, *_), (second, *_) = profiled

    expected = [False] * (NUM_WARM_UP_STEPS + NUM_STEPS) + [True] * (NUM_WARM_UP_STEPS + NUM_STEPS)
    assert [(steps, is_untouched) for _, steps, is_untouched, _ in profiled] == [(expected, True)] * 2
    assert first.costs == second.costs
    assert [(found.rank, found.num_steps, found.program.name) for found in (first, second)] == [
        (0, NUM_STEPS, "1f1b"), (1, NUM_STEPS, "1f1b"),
    ]  # fmt: skip
    assert simulate(first.program, first.costs).makespan_s > 0
    assert [(wire.sender, wire.receiver) for wire in first.channels] == [(0, 1), (1, 0)]
    assert first.costs.is_exclusive
    assert first.costs.bandwidth_bytes_per_s > 1e6


def test_costs_are_those_of_stages_channels_and_bytes(profiled):
    costs = profiled[0][0].costs
    sizes = [size for *_, size in profiled]

    parts = (costs.split_forward_s, costs.backward_input_s, costs.backward_weight_s)
    assert all(min(seconds) > 0 for seconds in (costs.forward_s, costs.backward_s, *parts))
    assert sorted((spread.kind.letter, spread.stage) for spread in costs.spreads) == [
        ("B", 0), ("B", 1), ("F", 0), ("F", 1), ("I", 0), ("I", 1), ("W", 0), ("W", 1),
    ]  # fmt: skip
    assert costs.message_bytes == (2 * 8 * 16 * 4, 0)
    assert list(costs.gradient_bytes) == sizes
    assert costs.parameter_bytes == tuple(size + 2 * TABLES_BYTES for size in sizes)
    # AdamW keeps two numbers for each parameter, and a count for each tensor.
    assert all(2 * size < kept < 2.1 * size for kept, size in zip(costs.optimizer_bytes, sizes, strict=True))
    assert min(costs.activation_bytes) >= 2 * 8 * 16 * 4


def test_costs_per_layer_add_up_to_those_of_the_stages(profiled):
    found = profiled[0][0]
    stages = found.layer_costs.of_stages([3, 4])  # embedding and two blocks; two blocks, norm and head

    assert found.layer_costs.num_layers == 7
    assert found.layer_costs.split == (3, 4)
    for name in ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "split_forward_s"):
        assert getattr(stages, name) == pytest.approx(getattr(found.costs, name))
    for name in ("activation_bytes", "weight_context_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(stages, name) == getattr(found.costs, name)
    assert (stages.launch_s, stages.latency_s) == (found.costs.launch_s, found.costs.latency_s)


def test_each_term_is_measured_of_each_layer(profiled):
    layers = profiled[0][0].layer_costs
    output = 2 * 8 * 16 * 4  # of a microbatch, in float32
    embedding, *blocks, norm, head = range(7)

    assert layers.message_bytes == (output,) * 6 + (2 * 8 * VOCABULARY * 4,)
    assert layers.checkpoint_bytes == (0,) + (output,) * 6
    assert len({layers.activation_bytes[block] for block in blocks}) == 1
    # Blocks this small leave no weights for later; an embedding waits for the gradient of its output.
    assert (layers.weight_context_bytes[embedding], layers.weight_context_bytes[norm]) == (output, 0)
    assert layers.parameter_bytes[head] == 16 * VOCABULARY * 4
    assert sum(layers.gradient_bytes) == sum(size for *_, size in profiled)
    for layer in range(7):
        tables_bytes = TABLES_BYTES if layer in blocks else 0
        assert layers.parameter_bytes[layer] == layers.gradient_bytes[layer] + tables_bytes


def test_the_file_of_a_profile_serves_other_ranks_and_stages(profiled):
    written = costs_to_toml(profiled[0][0].layer_costs)
    layers = costs_from_toml(written)

    for name, ranks in (("1f1b", 4), ("zbv", 3), ("chimera", 2), ("1f1b", 1)):
        schedule = build(name, ranks=ranks, microbatches=8)
        costs = stage_costs(layers, schedule)
        assert sum(costs.activation_bytes) == sum(layers.activation_bytes) * len(schedule.placement.routes)
        assert simulate(lower(schedule), costs).makespan_s > 0


def test_a_schedule_that_splits_backwards_is_profiled_as_it_is():
    def case(pipeline):
        return profile_pipeline(pipeline, dataset(), NUM_STEPS)

    costs = on_small_pipelines(2, case, schedule="zb-h1")[0].costs

    assert {spread.kind.letter for spread in costs.spreads} == {"F", "I", "W"}
    assert costs.split_forward_s == ()


@pytest.mark.slow
def test_costs_per_layer_are_of_whole_microbatches_also_where_these_run_in_slices():
    def case(pipeline):
        return profile_pipeline(pipeline, dataset(), 1)

    sliced = on_small_pipelines(2, case, schedule="seq1f1b", slices=2)[0]
    whole = on_small_pipelines(2, case)[0]

    assert sliced.layer_costs.message_bytes == whole.layer_costs.message_bytes
    assert [2 * size for size in sliced.costs.message_bytes] == list(whole.costs.message_bytes)
    assert sliced.layer_costs.of_stages([3, 4]).forward_s == pytest.approx(
        [2 * each for each in sliced.costs.forward_s]
    )


def test_a_run_is_profiled_without_touching_what_its_folder_holds(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text("of an earlier run")
    config = config_from_table(tiny_table(folder, text))

    found = profile_run(config, num_steps=1)

    assert found.channels == ()
    assert found.costs.forward_s[0] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["summary.json", "tokens"]
