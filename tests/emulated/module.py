"""`torch.emu`: what torch and programs look for in the module of a device type."""

import torch

from tests.emulated.runtime import RUNTIME

NUM_DEVICES = 8


class DeviceModule:
    """The functions of torch.cuda that go without CUDA."""

    def __init__(self):
        self.default_generators = tuple(map(RUNTIME.extension.default_generator, range(NUM_DEVICES)))

    # ---- devices

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return NUM_DEVICES

    def current_device(self):
        return RUNTIME.extension.current_device()

    def set_device(self, device):
        RUNTIME.extension.set_device(_index(device))

    def get_amp_supported_dtype(self):
        return []

    def get_device_name(self, device=None):
        return "emulated device"

    # ---- random numbers

    def manual_seed(self, seed):
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed):
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        return self.default_generators[_index(device)].get_state()

    def set_rng_state(self, state, device=None):
        self.default_generators[_index(device)].set_state(state)


def _index(device):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return RUNTIME.extension.current_device() if index is None else index
