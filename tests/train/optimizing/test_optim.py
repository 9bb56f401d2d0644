"""The optimizer: its class, its groups, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.errors import ConfigError
from penstock.models import embedding_names
from penstock.train.optimizing.optim import NOT_FOR_SHARDS, build_optimizer, check_optimizer
from penstock.train.settings.sections import OptimizerSection
from tests.train.local_ranks import small_layers

OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=4, minimum_fraction=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"0.weight": 0.1, "2.weight": 0.1, "1.weight": 0.0, "1.bias": 0.0, "2.bias": 0.0}),
        (
            {"decay_embeddings": False, "decay_vectors": True},
            {"0.weight": 0.0, "1.weight": 0.1, "1.bias": 0.1, "2.weight": 0.1, "2.bias": 0.1},
        ),
    ],
)
def test_only_matrices_decay_unless_embeddings_and_vectors_are_set_otherwise(options, expected):
    model = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 3))

    optimizer = build_optimizer(model.named_parameters(), OptimizerSection(**options), embeddings={"0.weight"})

    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decay == expected


def test_the_options_reach_adamw():
    parameter = nn.Parameter(torch.tensor([2.0]))
    options = OptimizerSection(learning_rate=0.5, beta1=0.8, beta2=0.7, epsilon=0.25)
    optimizer = build_optimizer([("a", parameter)], options)
    parameter.grad = torch.tensor([3.0])

    optimizer.step()

    # the first step's means are corrected to the gradient and its square
    assert parameter.item() == pytest.approx(2 - 0.5 * 3 / (3 + 0.25))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.7)


def test_shared_and_frozen_parameters_and_empty_ranks_are_fine():
    shared = nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    optimizer = build_optimizer([("a", shared), ("b", shared), ("c", frozen)], OPTIONS)

    assert [group["param_names"] for group in optimizer.param_groups] == [["a"]]
    build_optimizer([], OPTIONS).step()


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        ({"name": "AdmaW"}, "name", "Did you mean 'AdamW'"),
        ({"name": "Optimizer"}, "name", "torch.optim has no optimizer 'Optimizer'"),
        ({"options": {"amsgrads": True}}, "options.amsgrads", "Did you mean 'amsgrad'"),
        ({"options": {"lr": 0.1}}, "options.lr", "set optimizer.learning_rate"),
        ({"name": "SGD", "beta2": 0.5}, "beta2", "SGD does not take it"),
        ({"name": "SGD", "options": {"momentum": -1.0}}, "name", "Invalid momentum value: -1.0"),
        ({"name": "LBFGS"}, "name", "LBFGS cannot train with these options"),
        ({"name": "SparseAdam"}, "name", "does not support dense gradients"),
        *(
            ({"name": name}, "name", f"{name} cannot step shards of parameters; take another")
            for name in NOT_FOR_SHARDS
        ),
    ],
)
def test_what_cannot_train_is_refused_before_a_run(given, key, message):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(OptimizerSection(**given), is_sharded="shards" in message)

    assert caught.value.key == f"optimizer.{key}"
    assert message in str(caught.value)


# ---- classes of torch


CLASSES = [("SGD", {"momentum": 0.9}), ("Adafactor", {}), ("RMSprop", {"alpha": 0.5})]


@pytest.mark.parametrize(("name", "options"), CLASSES)
def test_a_class_of_torch_gets_the_keys_that_it_takes_and_its_own(name, options):
    section = OptimizerSection(name=name, options=options, learning_rate=0.25, weight_decay=0.5)

    check_optimizer(section)
    optimizer = build_optimizer([("a", nn.Parameter(torch.ones(2, 2)))], section)

    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert {key: optimizer.defaults[key] for key in options} == options


@pytest.mark.parametrize(
    ("given", "is_fused"),
    [({}, True), ({"name": "SGD"}, True), ({"options": {"foreach": False}}, None), ({"name": "RMSprop"}, "absent")],
)
def test_a_gpu_gets_the_fused_implementation_where_there_is_one(given, is_fused):
    """The parameters are on the CPU, which has it too: which one is made depends on the device that is named alone."""
    named = [("a", nn.Parameter(torch.ones(2, 2)))]

    on_gpu, on_cpu = (
        build_optimizer(named, OptimizerSection(**given), device=torch.device(kind)) for kind in ("cuda", "cpu")
    )

    assert on_gpu.param_groups[0].get("fused", "absent") == is_fused
    assert not on_cpu.param_groups[0].get("fused", False) or is_fused == "absent"


def test_a_head_that_is_tied_to_the_embedding_is_one_for_the_decay():
    assert embedding_names(small_layers()) == {"embedding.weight"}
    assert embedding_names(small_layers(tied_head=True)) == {"embedding.weight", "head.weight"}


# ---- shards


def named_parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "vector": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).double()) for name, shape in shapes.items()}


def step_shards(rank, options, has_main_weights):
    """Three steps on shards of parameters; returns the groups' options and, as whole tensors, what became of them."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = {
        name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        for name, parameter in named_parameters().items()
    }
    optimizer = build_optimizer(sharded.items(), options, has_main_weights=has_main_weights)
    for _ in range(3):
        for parameter in sharded.values():
            gradient = parameter.detach().clone()
            if has_main_weights:
                parameter.main_grad = gradient
            else:
                parameter.grad = gradient
        optimizer.step()
    implementations = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
    return implementations, {name: parameter.detach().full_tensor() for name, parameter in sharded.items()}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("AdamW", {}, (True, None)),
        ("SGD", {"momentum": 0.9}, (True, None)),
        ("AdamW", {"foreach": False}, (False, None)),
        ("AdamW", {"fused": True}, (None, True)),
    ],
)
def test_shards_are_stepped_at_once_to_the_same_values_unless_options_say_otherwise(two_ranks, name, given, expected):
    options = OptimizerSection(name=name, options=given)
    whole = named_parameters()
    optimizer = build_optimizer(whole.items(), options)
    assert optimizer.param_groups[0].get("foreach") in (None, given.get("foreach"))
    for _ in range(3):
        for parameter in whole.values():
            parameter.grad = parameter.detach().clone()
        optimizer.step()

    results = two_ranks.run(step_shards, options, False) + two_ranks.run(step_shards, options, True)
    for implementations, found in results:
        assert [(foreach, fused or None) for foreach, fused in implementations] == [expected] * 2
        torch.testing.assert_close(found, {name: each.detach() for name, each in whole.items()}, rtol=0, atol=1e-14)


def step_each_class(rank):
    """Return, by class of torch.optim, the weights of a matrix after two steps on shards; None where a step fails."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in CLASSES:
        matrix = nn.Parameter(distribute_tensor(torch.arange(16.0).view(4, 4) / 10, mesh, [Shard(0)]))
        try:
            optimizer = getattr(torch.optim, name)([matrix], lr=0.1)
            for _ in range(2):
                matrix.grad = matrix.detach().clone()
                optimizer.step()
            found[name] = matrix.detach().full_tensor()
        except (RuntimeError, NotImplementedError):
            found[name] = None
    return found


NOT_TRIED = ("Optimizer", "LBFGS")
CLASSES = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name not in NOT_TRIED]
"""Those whose step needs no closure."""


def test_the_classes_that_cannot_step_shards_are_those_that_are_refused(two_ranks):
    for found in two_ranks.run(step_each_class):
        for name, weights in found.items():
            if name in NOT_FOR_SHARDS:
                assert weights is None, name
                continue
            matrix = nn.Parameter(torch.arange(16.0).view(4, 4) / 10)
            optimizer = getattr(torch.optim, name)([matrix], lr=0.1)
            for _ in range(2):
                matrix.grad = matrix.detach().clone()
                optimizer.step()
            tolerance = 2e-2 if name == "Muon" else 1e-6  # it multiplies matrices in bfloat16
            torch.testing.assert_close(weights, matrix.detach(), rtol=tolerance, atol=tolerance, msg=name)
