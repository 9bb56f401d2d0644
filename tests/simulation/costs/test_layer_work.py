"""What a layer does: products are counted, and sizes that cannot be are refused with their field."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.simulation.costs.layer_work import LayerWork, PassWork, Product

PRODUCT = Product(rows=8, columns=4, inner=16, data_type="bfloat16")
NOTHING = PassWork()
LAYER = LayerWork(
    name="0",
    forward=PassWork(products=(PRODUCT,), num_kernels=1),
    backward_input=NOTHING,
    backward_weight=NOTHING,
    num_parameters=64,
    trainable_parameters=64,
    parameter_bytes=128,
    gradient_bytes=128,
    activation_bytes=256,
    weight_context_bytes=64,
    message_bytes=64,
    checkpoint_bytes=256,
    forward_workspace_bytes=0,
    backward_workspace_bytes=0,
)


def test_a_product_counts_a_multiplication_and_an_addition_for_each_pair_of_numbers():
    assert PRODUCT.flops == 2 * 8 * 4 * 16


def test_flops_are_those_of_the_share_that_is_computed_of_all_products_of_a_batch():
    assert replace(PRODUCT, batch=3, computed_share=0.5).flops == 0.5 * 3 * PRODUCT.flops


def test_the_flops_of_a_pass_are_those_of_its_products():
    assert PassWork(products=(PRODUCT, replace(PRODUCT, batch=2))).flops == 3 * PRODUCT.flops
    assert NOTHING.flops == 0


@pytest.mark.parametrize("name", ["rows", "columns", "inner", "batch"])
def test_sizes_of_a_product_that_are_no_whole_numbers_are_refused(name):
    for size in (-1, 0.5):
        with pytest.raises(ConfigError, match=f"{name}.*expected a whole number, 0 or more"):
            replace(PRODUCT, **{name: size})


def test_a_kind_of_kernel_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"atention.*matmul, attention, grouped, convolution\. Did you mean 'attention'"
    ):
        replace(PRODUCT, kernel="atention")


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match=r"computed_share.*above 0 and at most 1"):
        replace(PRODUCT, computed_share=share)


@pytest.mark.parametrize("name", ["parameter_bytes", "backward_workspace_bytes", "num_parameters"])
def test_sizes_of_a_layer_that_are_negative_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}.*-2"):
        replace(LAYER, **{name: -2})


def test_a_pass_that_moves_a_part_of_a_byte_is_refused():
    with pytest.raises(ConfigError, match=r"moved_bytes.*0\.5"):
        PassWork(moved_bytes=0.5)


def test_a_layer_cannot_train_more_parameters_than_it_has():
    with pytest.raises(ConfigError, match=r"trainable_parameters.*layer '?0'?: 65 are more than the layer's 64"):
        replace(LAYER, trainable_parameters=65)
