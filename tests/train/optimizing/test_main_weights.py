"""Float32 copies of weights in low precision: stepped, rounded, saved and loaded."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from penstock import load_checkpoint, save_checkpoint
from penstock.checkpoints.optimizer_state import MAIN_WEIGHT
from penstock.errors import CheckpointError, ConfigError
from penstock.execute.stages.stage import Stage
from penstock.models import DecoderConfig, decoder_layers
from penstock.train.optimizing.main_weights import MainWeightOptimizer
from penstock.train.optimizing.precision import Precision
from penstock.train.profiling import state_bytes
from penstock.train.settings.sections import OptimizerSection, PrecisionSection
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers

SHAPES = {"matrix": (4, 3), "vector": (5,)}


def make(seed=0, dtype=torch.bfloat16, optimizer_class=torch.optim.AdamW, **options):
    """Two named parameters with an optimizer of their main weights, in two groups."""
    generator = torch.Generator().manual_seed(seed)
    named = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}
    for parameter in named.values():
        parameter.main_grad = None
    groups = [{"params": [pair], "weight_decay": decay} for pair, decay in zip(named.items(), (0.1, 0.0), strict=True)]
    return named, MainWeightOptimizer(groups, optimizer_class, **{"lr": 0.01} | options)


def give_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.main_grad = torch.randn(parameter.shape, generator=generator)


def step(named, optimizer, seed):
    give_gradients(named, seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_main_weights_are_those_of_float32_training_and_the_weights_are_these_rounded(dtype):
    named, optimizer = make(dtype=dtype)
    plain = {name: nn.Parameter(parameter.detach().float()) for name, parameter in named.items()}
    groups = [{"params": [plain["matrix"]], "weight_decay": 0.1}, {"params": [plain["vector"]], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=0.01)

    for seed in range(5):
        give_gradients(named, seed)
        for name, parameter in plain.items():
            parameter.grad = named[name].main_grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        expected.step()

    for name, parameter in plain.items():
        assert torch.equal(optimizer.state[named[name]][MAIN_WEIGHT], parameter)
        assert torch.equal(named[name], parameter.to(dtype))
        assert (named[name].main_grad, named[name].grad) == (None, None)


def test_the_groups_are_those_of_the_parameters_and_their_rates_count():
    named, optimizer = make()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer.param_groups[0]["lr"] = 0.0

    step(named, optimizer, 0)

    assert [group["params"] for group in optimizer.param_groups] == [[named["matrix"]], [named["vector"]]]
    assert [group["param_names"] for group in optimizer.param_groups] == [["matrix"], ["vector"]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert torch.equal(named["matrix"], before["matrix"])
    assert not torch.equal(named["vector"], before["vector"])


@pytest.mark.parametrize(
    ("num_steps", "optimizer_class"), [(3, torch.optim.AdamW), (0, torch.optim.SGD), (3, torch.optim.NAdam)]
)
def test_what_was_saved_goes_on_bit_for_bit_where_it_is_loaded(num_steps, optimizer_class):
    named, optimizer = make(optimizer_class=optimizer_class)
    others, loaded = make(seed=1, optimizer_class=optimizer_class)
    for seed in range(num_steps):
        step(named, optimizer, seed)

    saved = deepcopy(optimizer.state_dict())  # as from a file: torch's own loading shares tensors
    loaded.load_state_dict(saved)

    assert all(saved["state"][number][MAIN_WEIGHT].dtype is torch.float32 for number in (0, 1))
    assert all(torch.equal(others[name], named[name]) for name in SHAPES)
    for seed in (7, 8):
        step(named, optimizer, seed)
        step(others, loaded, seed)
        for name in SHAPES:
            own, other = optimizer.state[named[name]], loaded.state[others[name]]
            assert own.keys() == other.keys()
            assert all(own[key] is other[key] is None or torch.equal(own[key], other[key]) for key in own)
            assert torch.equal(named[name], others[name])


def test_a_state_without_a_main_weight_is_refused_and_changes_nothing_and_weights_from_outside_are_taken():
    named, optimizer = make()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    saved = make(seed=1)[1].state_dict()
    del saved["state"][1][MAIN_WEIGHT]

    with pytest.raises(CheckpointError, match=r"parameter 1 .* of shape \(5,\), but its saved state has none"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(named[name], before[name]) for name in SHAPES)

    with torch.no_grad():
        named["vector"].fill_(3.0)
    optimizer.take_weights()
    assert optimizer.state[named["vector"]][MAIN_WEIGHT].tolist() == [3.0] * 5


def test_without_gradients_beside_the_parameters_it_says_what_is_missing():
    optimizer = MainWeightOptimizer([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], torch.optim.SGD, lr=1.0)

    with pytest.raises(ConfigError, match="need a pipeline with main_gradients=True"):
        optimizer.step()


# ---- memory


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zbv"])
def test_the_model_of_memory_knows_main_weights_and_sums_in_float32(schedule):
    batch = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))
    inputs, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def case(pipeline):
        optimizer = MainWeightOptimizer(pipeline.named_parameters(), torch.optim.AdamW)
        pipeline.step(inputs, target=target)
        optimizer.step()
        report = pipeline.memory_report(inputs, target=target, optimizer=optimizer)
        buffers = [each for stage in pipeline.stages for layer in stage.layers.values() for each in layer.buffers()]
        num_parameters = sum(parameter.numel() for parameter in pipeline.parameters())
        return report, num_parameters, sum(buffer.nbytes for buffer in buffers)

    shape = DecoderConfig(vocabulary=64, length=64, width=128, layers=4, heads=2, key_value_heads=2, hidden=256)
    layers = Precision(PrecisionSection(compute="bfloat16")).cast(decoder_layers(shape))
    results = on_small_pipelines(2, case, layers, schedule=schedule, microbatches=8, main_gradients=True)

    for (report, num_parameters, buffer_bytes), memory in zip(results, results[0][0].ranks, strict=True):
        gradients = sum(stage.gradient_bytes for stage in memory.stages)
        assert sum(stage.parameter_bytes for stage in memory.stages) == 2 * num_parameters + buffer_bytes
        assert gradients == 4 * num_parameters
        assert memory.optimizer_bytes == pytest.approx(12 * num_parameters, rel=0.01)
        predicted = report.predicted_bytes[memory.rank]
        assert predicted == pytest.approx(memory.counted_bytes + memory.optimizer_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        (OptimizerSection(), 3 * 4 * 12 + 4),
        (OptimizerSection(name="SGD"), 4 * 12),
        (OptimizerSection(name="SGD", options={"momentum": 0.9}), 2 * 4 * 12),
    ],
)
def test_a_profile_counts_main_weights_and_what_the_optimizer_keeps_beside_them(options, num_bytes):
    stage = Stage(0, {"layer": nn.Linear(4, 3, bias=False).bfloat16()})

    assert state_bytes([stage], options, has_main_weights=True) == {"0": num_bytes}


# ---- checkpoints


def train_pipeline(pipeline, optimizer, seeds):
    for seed in seeds:
        tokens, target = random_batch(seed)
        pipeline.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()


def test_main_weights_that_2_ranks_saved_go_on_bit_for_bit_on_any_number_of_ranks(tmp_path):
    def save(pipeline, optimizer):
        train_pipeline(pipeline, optimizer, range(2))
        save_checkpoint(tmp_path / "run", pipeline, optimizer, step=2)

    def load(pipeline, optimizer):
        load_checkpoint(tmp_path / "run", pipeline, optimizer)

    def weights_of(num_ranks, begin):
        """Weights and main weights by name after two more steps than were made at first."""

        def case(pipeline):
            optimizer = MainWeightOptimizer(pipeline.named_parameters(), torch.optim.AdamW, lr=0.01)
            begin(pipeline, optimizer)
            train_pipeline(pipeline, optimizer, range(2, 4))
            return {
                name: (each.detach(), optimizer.state[each][MAIN_WEIGHT]) for name, each in pipeline.named_parameters()
            }

        layers = Precision(PrecisionSection(compute="bfloat16")).cast(small_layers())
        parts = on_small_pipelines(num_ranks, case, layers, main_gradients=True)
        return {name: pair for own in parts for name, pair in own.items()}

    expected = weights_of(2, save)

    for num_ranks in (1, 3):
        found = weights_of(num_ranks, load)
        assert found.keys() == expected.keys()
        assert all(torch.equal(*pair) for name in found for pair in zip(found[name], expected[name], strict=True))
