"""Which operators of torch draw random numbers, and in place."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.models.cutting.undocumented import KernelMode

DRAWS = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_"),
        *("multinomial", "normal", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
        *("random_", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_", "trunc_normal_", "kaiming_uniform_"),
        *(
            "uniform",
            "exponential",
            "geometric",
            "log_normal",
            "cauchy",
            "random",
            "_standard_gamma",
            "_sample_dirichlet",
        ),
        *("fractional_max_pool2d", "fractional_max_pool3d", "xavier_uniform_", "xavier_normal_", "kaiming_normal_"),
    )
)
"""Operators that draw at each call."""
DROPOUTS = frozenset(
    (
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
        *("native_dropout", "_fused_dropout"),
        *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout"),
    )
)
"""Operators that draw in training, where their probability is not 0: `(input, p, training, inplace)`."""
PAIRS = frozenset(("native_dropout", "_fused_dropout", "rrelu_with_noise", "rrelu_with_noise_"))
"""Operators that return or fill a second tensor beside what they draw."""
ATTENTION = ("_scaled_dot_product", "_flash", "_efficient", "_cudnn_rnn", "miopen", "gru", "lstm", "rnn")
"""How operators begin that draw for a dropout alone; torch marks them all as drawing."""


class UnknownDraws(KernelMode):  # type: ignore[misc]
    """Finds kernels that draw random numbers, also those that no function of torch shows, on this thread alone."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        """The name of one that has drawn and was not expected."""
        self._is_expected = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Take no note of what is drawn inside."""
        was_expected, self._is_expected = self._is_expected, True
        try:
            yield
        finally:
            self._is_expected = was_expected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not (self._is_expected or name.startswith(ATTENTION)):
            has_dropout = name in DROPOUTS or name == "scaled_dot_product_attention"  # as under inference mode
            self.name = name if not has_dropout or is_draw(name, args, kwargs) else self.name
        return func(*args, **kwargs)


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
    return name in DRAWS or name in PAIRS


def draws_in_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a draw puts its result into its first argument, or into `out`."""
    is_inplace = kwargs.get("inplace", args[3] if name in DROPOUTS and len(args) > 3 else False)
    return name.endswith("_") or bool(is_inplace) or kwargs.get("out") is not None
