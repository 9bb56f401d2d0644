"""What tests do whose claim is about kernels that Inductor makes, where it can make none."""

import pytest

from penstock.execute.undocumented_compiler import obstacle_to_inductor


def skip_without_inductor():
    """Skip a test where Inductor cannot compile for the CPU, with the reason."""
    if obstacle := obstacle_to_inductor("cpu"):
        pytest.skip(obstacle)
