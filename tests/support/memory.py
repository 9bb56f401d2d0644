"""The most memory that the test's process has held, as Linux counts it."""

import re
from pathlib import Path

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of a process with which memory goes back to the system as soon as it is free."""


def peak_bytes():
    """Return the most bytes since `reset_peak`."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
