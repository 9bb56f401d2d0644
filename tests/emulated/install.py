"""Make this process one in which torch has the device `emu`, which cannot be undone."""

from functools import cache

import torch

from tests.emulated import copies, kernels
from tests.emulated.build import load
from tests.emulated.module import NUM_DEVICES, DeviceModule
from tests.emulated.nccl import register_backend
from tests.emulated.runtime import RUNTIME


@cache
def install():
    """Install the device once. Never in a process of pytest: torch has room for one such device only."""
    extension = load()
    RUNTIME.attach(extension)
    extension.install(RUNTIME, NUM_DEVICES)
    torch.utils.rename_privateuse1_backend(kernels.DEVICE)
    libraries = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    copies.register(libraries[0])
    kernels.register(*libraries)
    torch._register_device_module(kernels.DEVICE, DeviceModule())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_backend()
    return libraries  # torch forgets the kernels of a library that is dropped
