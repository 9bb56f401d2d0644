"""The bytes of gradients and optimizer state of a parameter, as a run of some precision and optimizer keeps them."""

from penstock.train.optimizing.precision import Precision
from penstock.train.settings.sections import OptimizerSection, PrecisionSection

MAIN_BYTES = 4
"""Of a main weight, a main gradient, and a moment beside them: all of them are float32."""
MOMENTS = {"SGD": 0, "Adafactor": 0, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "ASGD": 1, "Adamax": 2, "Muon": 1}
"""Values that an optimizer keeps of a parameter, about; every other one keeps two, as Adam does."""


def gradient_bytes_of(precision: PrecisionSection, parameter_bytes: float) -> float:
    """Return the bytes of the gradient of one parameter of so many bytes."""
    return MAIN_BYTES if Precision(precision).has_main_weights else parameter_bytes


def optimizer_bytes_of(precision: PrecisionSection, optimizer: OptimizerSection, parameter_bytes: float) -> float:
    """Return the bytes of the main weight, where there is one, and of the optimizer's state of one parameter."""
    moments = MOMENTS.get(optimizer.name, 2)
    if optimizer.name == "SGD" and optimizer.options.get("momentum"):
        moments = 1
    if Precision(precision).has_main_weights:
        return MAIN_BYTES * (1 + moments)
    return parameter_bytes * moments
