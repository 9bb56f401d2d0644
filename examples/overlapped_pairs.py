"""Overlapped pairs: DualPipe-V gives a forward and a backward that may run at once, and a hook runs them so.

python examples/overlapped_pairs.py

On a CPU the hook uses two threads, on CUDA two streams. Both compute what a pipeline without a hook does. The part for
CUDA follows torch's rules for streams, but has not been run where this was written: there was no GPU.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import penstock as ps


class InTwoThreads:
    """Runs the second computation in a thread of its own."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(1)

    def __call__(self, first, second):
        other = self._threads.submit(second)
        first()
        other.result()  # raises what it raised


class OnTwoStreams:
    """Runs the forward of a pair beside the stream on which its backward runs.

    torch runs a backward on the stream of its forward, so what counts is where each forward ran: [1] the forward at
    hand takes the other stream. [2] Both streams wait for each other around a pair, so memory that one has freed is
    free for the other. [3] The forward is queued first: then nothing it allocates was freed by the backward beside it.
    [4] A backward is called on its own stream: autograd lets it wait for all that the current stream has queued, which
    else would be the forward. An input that needs no gradient and that autograd does not keep, such as a mask, must
    stay alive by itself.
    """

    def __init__(self, device):
        self._side = torch.Stream(device)
        self._on_side = set()  # of the microbatches between their forward and backward, those that ran there

    def __call__(self, first, second):
        forward, backward = first, second
        main = torch.accelerator.current_stream()
        side_is_taken = _place(backward) in self._on_side
        self._on_side -= {_place(backward), _place(forward)}
        self._side.wait_stream(main)  # [2]
        if side_is_taken:
            forward()  # [3]
            with self._side:
                backward()  # [4]
        else:
            self._on_side.add(_place(forward))  # [1]
            with self._side:
                forward()  # [3]
            backward()  # [4]
        main.wait_stream(self._side)  # [2]


def _place(computation):
    instruction = computation.instruction
    return instruction.stage, instruction.microbatch, instruction.slice


def gradients(device, overlap):
    """Train one step of DualPipe-V, on one rank that holds both stages, and return the gradients."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    schedule = ps.build("dualpipe-v", ranks=1, microbatches=8)
    pipeline = ps.Pipeline(layers, schedule, loss=nn.functional.mse_loss, device=device, overlap=overlap)
    inputs, target = torch.randn(2, 64, 32, device=device)
    pipeline.step(inputs, target=target)
    return [parameter.grad for parameter in pipeline.parameters()]


def main():
    """Say whether a hook changes anything."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    hook = InTwoThreads() if device.type == "cpu" else OnTwoStreams(device)
    pairs = zip(gradients(device, None), gradients(device, hook), strict=True)
    same = all(torch.equal(by_itself, overlapped) for by_itself, overlapped in pairs)
    print(f"{type(hook).__name__} on {device.type}: gradients {'equal bit for bit' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
