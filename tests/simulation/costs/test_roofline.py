"""Seconds from a data sheet: operations, tiles and bytes; what is refused; and times that others measured."""

import math
from dataclasses import replace

import pytest

from bench.decoder_work import Decoder, Run, block_of, head_of, works_of
from penstock.errors import ConfigError
from penstock.simulation import LayerCosts
from penstock.simulation.costs.devices import Device, Kernels, Link, device
from penstock.simulation.costs.layer_work import LayerWork, PassWork, Product
from penstock.simulation.costs.replicas import of_replicas
from penstock.simulation.costs.roofline import (
    CALIBRATION,
    CALIBRATION_RANGE,
    LEAST_INNER,
    TILE_START,
    ReplicaExchange,
    layer_costs,
    pass_s,
    range_s,
    seconds_of,
)

KERNELS = Kernels(
    multiprocessors=10, matmul_share=0.5, attention_share=0.25, attention_backward_share=0.2, memory_share=0.8,
    launch_s=1e-6,
)  # fmt: skip
DEVICE = Device(
    name="mine", bf16_flops_per_s=2e12, fp16_flops_per_s=2e12, tf32_flops_per_s=1e12, fp32_flops_per_s=5e11,
    memory_bytes=10**9, memory_bytes_per_s=1e12, source="", kernels=KERNELS,
)  # fmt: skip
LINK = Link(name="wire", bandwidth_bytes_per_s=1e9, source="", latency_s=1e-5, reached_share=0.9)
PRODUCT = Product(rows=2560, columns=2560, inner=10_000, data_type="bfloat16")
"""100 whole tiles of 256 x 256, which ten multiprocessors share evenly in each way of cutting it."""
PASS = PassWork(products=(PRODUCT,), moved_bytes=800, num_kernels=3)
LAYER = LayerWork(
    name="block", forward=PASS, backward_input=PASS, backward_weight=PASS, num_parameters=100, trainable_parameters=50,
    parameter_bytes=200, gradient_bytes=100, activation_bytes=7, weight_context_bytes=6, message_bytes=5,
    checkpoint_bytes=4, forward_workspace_bytes=3, backward_workspace_bytes=2,
)  # fmt: skip
A100 = device("a100-sxm-80gb")


def costs_of(*layers, **options):
    return layer_costs(layers or (LAYER,) * 2, DEVICE, link=LINK, **options)


def test_a_large_product_takes_its_operations_over_the_share_of_the_peak_and_the_start_of_its_tiles():
    ideal_s = PRODUCT.flops / (0.5 * 2e12)

    assert seconds_of(PRODUCT, DEVICE) == pytest.approx(ideal_s * (1 + TILE_START / PRODUCT.inner))


@pytest.mark.parametrize(("data_type", "times"), [("float16", 1), ("tf32", 2), ("float32", 4)])
def test_a_slower_type_takes_longer(data_type, times):
    assert seconds_of(replace(PRODUCT, data_type=data_type), DEVICE) == pytest.approx(
        times * seconds_of(PRODUCT, DEVICE)
    )


def test_a_part_of_a_tile_takes_as_long_as_a_whole_one():
    ragged = replace(PRODUCT, rows=PRODUCT.rows - 30, columns=PRODUCT.columns - 30)

    assert seconds_of(ragged, DEVICE) == seconds_of(PRODUCT, DEVICE)


def test_a_wave_with_one_tile_takes_as_long_as_a_full_one():
    full = Product(rows=2560, columns=128, inner=LEAST_INNER, data_type="bfloat16")
    eleven = replace(full, rows=2816)

    # Tiles of 64 x 64 are slow, so that 11 tiles of 256 x 128 in two waves are no slower than 88 of these in nine.
    assert seconds_of(eleven, DEVICE) > 1.3 * seconds_of(full, DEVICE)


def test_a_product_with_few_tiles_is_cut_along_its_inner_dimension():
    narrow = Product(rows=256, columns=128, inner=64 * LEAST_INNER, data_type="bfloat16")
    one_multiprocessor_s = narrow.flops / (0.5 * 2e12 / 10)

    # Small tiles alone would bring it to a fifth only, since kernels with them are slow.
    assert seconds_of(narrow, DEVICE) < one_multiprocessor_s / 7


def test_a_product_of_which_a_half_is_computed_takes_half():
    assert seconds_of(replace(PRODUCT, computed_share=0.5), DEVICE) == pytest.approx(0.5 * seconds_of(PRODUCT, DEVICE))


def test_a_product_with_little_to_compute_takes_its_bytes():
    thin = Product(rows=100_000, columns=1, inner=1, data_type="bfloat16", batch=50)

    slow = replace(DEVICE, memory_bytes_per_s=1e7)
    assert seconds_of(thin, slow) == pytest.approx(50 * 2 * 200_001 / 0.8e7)


def test_attention_reaches_its_own_share_and_less_backward():
    attention = replace(PRODUCT, kernel="attention", computed_share=0.5)

    assert seconds_of(attention, DEVICE) == pytest.approx(attention.flops / (0.25 * 2e12))
    assert seconds_of(attention, DEVICE, is_backward=True) == pytest.approx(attention.flops / (0.2 * 2e12))


def test_a_pass_takes_its_products_its_bytes_and_its_launches():
    assert pass_s(PASS, DEVICE) == pytest.approx(seconds_of(PRODUCT, DEVICE) + 800 / 0.8e12 + 3e-6)
    assert pass_s(PassWork(), DEVICE) == 0


def test_costs_are_calibrated_and_carry_the_range_of_public_runs():
    costs = costs_of()

    expected_s = CALIBRATION * pass_s(PASS, DEVICE)
    for name in ("forward", "backward_input", "backward_weight", "recompute"):
        assert getattr(costs, name) == pytest.approx((expected_s, expected_s))
    least_s, most_s = range_s(CALIBRATION, costs.seconds_range)
    assert (least_s, most_s) == pytest.approx(CALIBRATION_RANGE)
    assert costs.of_stages([1, 1]).seconds_range == costs.seconds_range
    assert costs.source == "roofline of mine x 1.15"


def test_attention_of_a_layer_takes_longer_backward():
    attention = PassWork(products=(replace(PRODUCT, kernel="attention"),))

    costs = costs_of(*[replace(LAYER, forward=attention, backward_input=attention)] * 2)

    assert costs.backward_input[0] == pytest.approx(costs.forward[0] * 0.25 / 0.2)


def test_measured_costs_have_no_range():
    assert LayerCosts(forward=(1.0, 2.0)).seconds_range == (1, 1)


def test_costs_have_the_bytes_of_the_layers_and_the_optimizer_those_of_trained_parameters():
    costs = costs_of(LAYER, replace(LAYER, activation_bytes=9, trainable_parameters=0, gradient_bytes=0))

    assert costs.activation_bytes == (7, 9)
    assert (costs.weight_context_bytes, costs.message_bytes, costs.checkpoint_bytes) == ((6, 6), (5, 5), (4, 4))
    assert (costs.parameter_bytes, costs.gradient_bytes) == ((200, 200), (100, 0))
    assert costs.optimizer_bytes == (8 * 50, 0)
    assert costs.optimizer == pytest.approx(((100 + 2 * 100 + 2 * 400) / 0.8e12, 0))
    assert costs_of(optimizer_bytes_per_parameter=12).optimizer_bytes == (600, 600)


def test_messages_take_the_latency_and_the_bandwidth_that_the_link_reaches():
    costs = costs_of()

    assert (costs.latency_s, costs.bandwidth_bytes_per_s, costs.is_exclusive) == (1e-5, 0.9e9, True)


def test_exchanges_over_replicas_are_rings_and_shards_need_their_own_sums_only():
    whole = costs_of(exchange=ReplicaExchange(replicas=4, link=LINK))
    shards = costs_of(exchange=ReplicaExchange(replicas=4, link=LINK, is_sharded=True))

    gather_s = 1e-5 + 3 / 4 * 200 / 0.9e9
    assert whole.unshard == pytest.approx((gather_s, gather_s))
    assert whole.reduce == pytest.approx([2 * (1e-5 + 3 / 4 * 100 / 0.9e9)] * 2)
    assert shards.reduce == pytest.approx([seconds / 2 for seconds in whole.reduce])
    assert (whole.shards, shards.shards, shards.replicas) == (1, 4, 4)
    assert costs_of().unshard == ()


def test_costs_with_exchanges_go_on_to_another_number_of_replicas():
    exchange = ReplicaExchange(replicas=4, link=LINK)
    eight = costs_of(exchange=replace(exchange, replicas=8)).of_stages([1, 1])

    grown = of_replicas(costs_of(exchange=exchange).of_stages([1, 1]), 8, is_sharded=False)

    assert grown.unshard_s == pytest.approx(eight.unshard_s)
    assert grown.reduce_s == pytest.approx(eight.reduce_s)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((), "work: is empty; give the work of one layer or more"),
        (
            [replace(LAYER, backward_weight=PassWork(unknown=("aten.scan", "aten.fft"))), LAYER],
            r"there is no formula for aten.fft \(layer 'block'\), aten.scan \(layer 'block'\); measure the layers with",
        ),
        (
            [replace(LAYER, forward=PassWork(products=(replace(PRODUCT, data_type="float8_e4m3fn"),)))],
            "data_type: mine has no peak for products of 'float8_e4m3fn'; known: bfloat16, float16, tf32, float32",
        ),
    ],
)
def test_work_that_no_formula_covers_is_refused_by_name(layers, told):
    with pytest.raises(ConfigError, match=told):
        layer_costs(layers, DEVICE, link=LINK)


def test_a_device_that_does_not_say_what_kernels_reach_is_refused():
    with pytest.raises(ConfigError, match=r"device: mine does not say what its kernels reach; .*kernels=Kernels\("):
        layer_costs([LAYER], replace(DEVICE, kernels=None), link=LINK)


@pytest.mark.parametrize("num_bytes", [-1, math.nan, math.inf])
def test_bytes_of_an_optimizer_that_are_no_number_are_refused(num_bytes):
    with pytest.raises(ConfigError, match=r"optimizer_bytes_per_parameter: .* costs are finite and 0 or more"):
        costs_of(optimizer_bytes_per_parameter=num_bytes)


def test_an_exchange_of_no_replica_is_refused():
    with pytest.raises(ConfigError, match="replicas: 0; expected 1 or more"):
        ReplicaExchange(replicas=0, link=LINK)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "microbatch", "measured_ms"),
    [
        (3, 2304, 24, 6, (18.522, 18.086, 9.337)),
        (4, 4096, 32, 3, (29.718, 29.444, 19.927)),
        (3, 5120, 40, 1, (11.307, 11.254, 8.101)),
        (2, 6144, 48, 1, (10.419, 10.207, 7.715)),
    ],
    ids=["1.5B", "6.2B", "14.6B", "28.3B"],
)
def test_stages_of_the_zero_bubble_paper_are_within_a_quarter(layers, hidden, heads, microbatch, measured_ms):
    """Times of arXiv 2401.10241, table 6: Megatron-LM on A100, 1024 tokens, scores of attention kept."""
    model = Decoder(
        layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden, vocabulary=1, is_gated=False
    )  # fmt: skip
    run = Run(
        sequence=1024, microbatch=microbatch, style="megatron", has_flash_attention=False, has_dropout=True,
        data_type="float16",
    )  # fmt: skip

    costs = layer_costs([block_of(model, run)] * layers, A100, link=LINK).of_stages([layers])

    predicted_ms = [1e3 * seconds[0] for seconds in (costs.forward_s, costs.backward_input_s, costs.backward_weight_s)]
    assert predicted_ms == pytest.approx(measured_ms, rel=0.25)
    assert math.fsum(predicted_ms) == pytest.approx(math.fsum(measured_ms), rel=0.12)


@pytest.mark.parametrize(
    ("vocabulary", "forward_ms", "backward_ms"), [(32_000, 14.603, 25.997), (256_000, 36.818, 52.363)]
)
def test_a_stage_with_a_head_is_within_a_quarter(vocabulary, forward_ms, backward_ms):
    """The last of 8 A100 with 4 layers of Megatron-LM and the head, 2048 tokens (tests/data/measured_gpu_1f1b.json)."""
    model = Decoder(
        layers=4, hidden=3072, heads=24, feed_forward=12288, vocabulary=vocabulary, is_gated=False
    )  # fmt: skip
    run = Run(sequence=2048, style="megatron", data_type="float16")

    costs = layer_costs([block_of(model, run)] * 4 + [head_of(model, run)], A100, link=LINK).of_stages([5])

    assert 1e3 * costs.forward_s[0] == pytest.approx(forward_ms, rel=0.25)
    assert 1e3 * (costs.backward_input_s[0] + costs.backward_weight_s[0]) == pytest.approx(backward_ms, rel=0.25)


def test_training_an_adapter_on_a_published_h100_is_within_a_quarter():
    """NeMo Automodel's performance summary of 2026-08: Qwen2.5 7B, rank 16, 2 x 4096 tokens, 14,110 tokens/s."""
    model = Decoder(
        layers=28, hidden=3584, heads=28, key_value_heads=4, feed_forward=18944, vocabulary=152_064
    )  # fmt: skip
    run = Run(sequence=4096, microbatch=2, lora_rank=16)

    costs = layer_costs(works_of(model, run), device("h100-sxm"), link=LINK)

    step_s = math.fsum((*costs.forward, *costs.backward_input, *costs.backward_weight))
    assert run.tokens / step_s == pytest.approx(14_110, rel=0.25)
