"""The costs of a described model on a described machine."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.simulation import Costs
from penstock.simulation.costs.analytic import Machine
from penstock.simulation.costs.devices import Device, Link
from penstock.simulation.costs.transformer import Transformer, embedding_of, head_of, layer_of

DEVICE = Device(
    name="mine", bf16_flops_per_s=1e12, fp16_flops_per_s=1e12, tf32_flops_per_s=5e11, fp32_flops_per_s=2.5e11,
    memory_bytes=10**9, memory_bytes_per_s=1e9, source="",
)  # fmt: skip
LINK = Link(name="wire", bandwidth_bytes_per_s=1e9, source="")
FAST = Link(name="fast", bandwidth_bytes_per_s=4e9, source="")
MACHINE = Machine(device=DEVICE, efficiency=0.5, link=LINK)
MODEL = Transformer(num_layers=6, hidden=64, num_heads=4, vocabulary=1000, sequence=16, microbatch=3)


def costs_of(model=MODEL, split=(1, 2, 3), **machine):
    return Costs.analytic(model, replace(MACHINE, **machine), layers_per_stage=split)


def test_seconds_are_flops_over_what_the_device_reaches():
    costs, layer, head = costs_of(), layer_of(MODEL), head_of(MODEL)

    forward_s = [count * layer.forward_flops / 5e11 for count in (1, 2, 3)]
    assert costs.forward_s == pytest.approx([*forward_s[:2], forward_s[2] + head.forward_flops / 5e11])
    assert costs.backward_input_s[0] == pytest.approx(layer.backward_input_flops / 5e11)
    assert costs.backward_weight_s[1] == pytest.approx(2 * layer.backward_weight_flops / 5e11)


@pytest.mark.parametrize(
    ("data_type", "efficiency", "times"), [("fp16", 0.5, 1), ("tf32", 0.5, 2), ("fp32", 0.5, 4), ("bf16", 0.25, 2)]
)
def test_a_slower_type_and_a_smaller_efficiency_which_is_named_take_longer(data_type, efficiency, times):
    found = costs_of(replace(MODEL, data_type=data_type), efficiency=efficiency)

    for name in ("forward_s", "backward_weight_s"):
        assert getattr(found, name) == pytest.approx([times * seconds for seconds in getattr(costs_of(), name)])
    assert found.source == f"mine at an efficiency of {efficiency}"


def test_bytes_are_those_of_the_layers_with_embedding_and_head_at_the_ends():
    costs, layer, ends = costs_of(), layer_of(MODEL), (embedding_of(MODEL), head_of(MODEL))

    assert costs.activation_bytes == (
        layer.activation_bytes + ends[0].activation_bytes,
        2 * layer.activation_bytes,
        3 * layer.activation_bytes + ends[1].activation_bytes,
    )
    assert costs.weight_context_bytes[1] == 2 * layer.weight_context_bytes
    assert costs.message_bytes == (2 * 16 * 3 * 64,)
    assert costs.bandwidth_bytes_per_s == 1e9
    assert costs.is_exclusive


def test_parameters_take_16_bytes_each_and_the_optimizer_moves_28():
    costs, count = costs_of(), 2 * layer_of(MODEL).num_parameters

    kept = costs.parameter_bytes[1], costs.gradient_bytes[1], costs.optimizer_bytes[1]
    assert kept == (2 * count, 2 * count, 12 * count)
    assert costs.optimizer_s[1] == pytest.approx(28 * count / 1e9)


def test_replicas_reduce_in_a_ring_and_gather_in_half_the_time():
    costs, count = costs_of(replicas=4, replica_link=FAST), 2 * layer_of(MODEL).num_parameters

    assert costs.reduce_s[1] == pytest.approx(2 * 3 / 4 * 2 * count / 4e9)
    assert costs.unshard_s[1] == pytest.approx(costs.reduce_s[1] / 2)
    assert costs_of(replicas=4).reduce_s[1] == pytest.approx(4 * costs.reduce_s[1])
    assert costs_of().reduce_s == (0, 0, 0)


def test_tensor_parallel_devices_share_the_work_and_reduce_twice_a_layer():
    alone, shared = costs_of(), costs_of(tensor_parallel=2, tensor_link=FAST)
    reduction_s = 2 * 1 / 2 * MODEL.message_bytes / 4e9

    assert shared.forward_s[1] == pytest.approx(alone.forward_s[1] / 2 + 2 * 2 * reduction_s)
    assert shared.backward_input_s[0] == pytest.approx(alone.backward_input_s[0] / 2 + 2 * 1 * reduction_s)
    assert shared.backward_weight_s[2] == pytest.approx(alone.backward_weight_s[2] / 2)
    for name in ("message_bytes", "activation_bytes", "weight_context_bytes", "parameter_bytes", "optimizer_bytes"):
        assert list(getattr(shared, name)) == [entry // 2 for entry in getattr(alone, name)]


NO_SUM = r"layers_per_stage: \[.*\] adds up to \d; the model has 6 layers"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"split": split}, NO_SUM) for split in ((1, 2), (), (7, -1))),
        ({"efficiency": 0.0}, "efficiency: 0.0; give the share of the peak that is reached, above 0 and at most 1"),
        ({"efficiency": 45}, "efficiency: 45; give the share"),
        ({"replicas": 0}, "replicas: 0; give 1 or more"),
        ({"tensor_parallel": 2}, "tensor_link: is missing; say what connects the 2 devices"),
    ],
)
def test_layers_that_do_not_add_up_and_a_machine_that_cannot_be_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        costs_of(**options)
