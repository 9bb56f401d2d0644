"""Which operators of torch draw random numbers, and in place."""

from collections.abc import Mapping, Sequence
from typing import Any

DRAWS = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_"),
        *("multinomial", "normal", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
        *("random_", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_", "trunc_normal_", "kaiming_uniform_"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "xavier_uniform_", "xavier_normal_", "kaiming_normal_"),
    )
)
"""Operators that draw at each call."""
DROPOUTS = frozenset(
    (
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout"),
    )
)
"""Operators that draw in training, where their probability is not 0: `(input, p, training, inplace)`."""


def is_draw(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of the operator `name` draws random numbers."""
    if name in DROPOUTS:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(training) and probability > 0
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("training", True)) and bool(kwargs.get("dropout_p", args[9] if len(args) > 9 else 0.0))
    return name in DRAWS


def draws_in_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a draw puts its result into its first argument."""
    is_inplace = kwargs.get("inplace", args[3] if name in DROPOUTS and len(args) > 3 else False)
    return name.endswith("_") or bool(is_inplace)
