"""Scenarios for planted faults: what hooks and observers of users do on a queued device, beside a step."""

import torch
from torch import nn

from tests.emulated.planted_scenarios import NUM_MICROBATCHES, ROWS, WIDTH
from tests.emulated.rank_threads import communicator


def here(rank):
    return torch.device("emu", rank)


def main_stream():
    return torch.accelerator.current_stream()


class Average:
    """The average of a weight over the steps, computed on a stream of its own."""

    def __init__(self, weight):
        self.weight, self.average = weight, weight.detach().clone()
        self.side = torch.Stream(weight.device)

    def begin(self):
        self.side.wait_stream(main_stream())

    def add(self):
        self.begin()
        with self.side:
            self.average.lerp_(self.weight.detach(), 0.1)

    def end(self):
        main_stream().wait_stream(self.side)


def averaged_weights(rank, num_ranks):
    """Weights are averaged beside the backward, before the next optimizer step."""
    layer = nn.Linear(WIDTH, WIDTH).to(here(rank))
    optimizer, average = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False), Average(layer.weight)
    for _ in range(3):
        average.add()
        layer(torch.ones(ROWS, WIDTH, device=here(rank))).sum().backward()
        average.end()
        optimizer.step()
        optimizer.zero_grad()
    return average.average.sum().item()


class Peaks:
    """The largest output of each call, read from pinned memory later."""

    def __init__(self, device):
        self.found, self.copied = torch.zeros(NUM_MICROBATCHES, pin_memory=True), torch.Event(device)

    def note(self, number, values):
        self.found[number : number + 1].copy_(values.detach().abs().max().reshape(1), non_blocking=True)
        self.copied.record()

    def read(self):
        self.copied.synchronize()
        return self.found.tolist()


def peaks_of_activations(rank, num_ranks):
    """An observer brings statistics of activations to the host."""
    layer, peaks = nn.Linear(WIDTH, WIDTH).to(here(rank)), Peaks(here(rank))
    for number in range(NUM_MICROBATCHES):
        peaks.note(number, layer(torch.ones(ROWS, WIDTH, device=here(rank))))
    return peaks.read()


class Norm:
    """The norm of a gradient over all ranks."""

    def __init__(self):
        self.messages = communicator("norms")

    def own(self, gradient):
        return gradient.square().sum().reshape(1)

    def reduce(self, square):
        return self.messages.all_reduce([square])

    def wait(self, work):
        work.wait()

    def scale(self, values):
        """Take the first rank's factor."""
        self.messages.broadcast([values]).wait()


def norms_over_ranks(rank, num_ranks):
    """A hook adds gradients' norms up, and all ranks take the first one's factor."""
    norm = Norm()
    square = norm.own(torch.full((ROWS, WIDTH), 1.0 + rank, device=here(rank)))
    work = norm.reduce(square)
    norm.wait(work)
    factor = square.sqrt()
    norm.scale(factor)
    return factor.item()


class Statistics:
    """What two ranks tell each other, over a communicator that is one queue for both directions."""

    def __init__(self, rank):
        self.rank, self.messages = rank, communicator("statistics")

    def sends_first(self):
        return self.rank == 0

    def send(self, values):
        return self.messages.send([values], 1 - self.rank)

    def wait(self, work):
        work.wait()

    def exchange(self, own):
        theirs = torch.empty_like(own)
        sent = self.send(own) if self.sends_first() else None
        received = self.messages.recv([theirs], 1 - self.rank)
        sent = sent or self.send(own)
        self.wait(received)
        return theirs, sent


def statistics_of_two_ranks(rank, num_ranks):
    """A hook sends its numbers to the other rank."""
    statistics = Statistics(rank)
    own = torch.full((WIDTH,), 1.0 + rank, device=here(rank))
    theirs, sent = statistics.exchange(own)
    total = theirs + own
    statistics.wait(sent)
    own.zero_()
    del own, theirs
    torch.ones(WIDTH, device=here(rank))
    return total.sum().item()
