"""Random numbers depend on seed, step, layer, microbatch and slice, and the caller's generators notice nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from penstock.errors import DeadlineExceeded
from penstock.execute.accelerator import default_generator
from penstock.execute.stages.randomness import LOSS, Randomness, RandomPart, default_generators, generator_seed

CPU = torch.device("cpu")


def seeded(seed, device=CPU, **options):
    return Randomness(seed, default_generators(device), **options)


def draw(randomness, place, layer, size=4, *, step=0):
    part = RandomPart(randomness, step, place)
    with part.around_forward():
        part.before_layer(layer)
        return torch.rand(size)


def test_every_step_layer_microbatch_and_slice_begins_elsewhere():
    places = product((0, 1), (0, 1, 2), (LOSS, 0, 1, 2), (0, 1, 2), (0, 1))

    found = [generator_seed(seed, step, layer, (microbatch, part)) for seed, step, layer, microbatch, part in places]

    assert len({start % 2**32 for start in found}) == len(found)  # torch's generator of the CPU uses 32 bits
    assert all(0 <= start < 2**63 for start in found)
    assert generator_seed(1, 2, 3, (4, 5)) == 776076787286141139  # in every process and version


def test_a_layer_draws_the_same_whatever_was_drawn_before():
    randomness = seeded(7)
    expected = draw(randomness, (2, 0), 5)

    part = RandomPart(randomness, 0, (2, 0))
    with part.around_forward():
        part.before_layer(4)
        torch.rand(100)
        part.before_layer(5)
        found = torch.rand(4)

    assert torch.equal(found, expected)
    assert not torch.equal(draw(seeded(8), (2, 0), 5), expected)


@pytest.mark.parametrize("first_microbatch", [0, 3])
def test_with_a_seed_a_forward_that_runs_again_draws_the_same_on_every_replica(first_microbatch):
    part = RandomPart(seeded(7, first_microbatch=first_microbatch), 2, (1, 0))
    drawn = []

    for each in (part, part.again()):
        with each.around_forward():
            each.before_layer(0)
            drawn.append(torch.rand(4))

    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], draw(seeded(7), (1 + first_microbatch, 0), 0, step=2))


def test_threads_take_turns_at_the_one_generator():
    expected = [draw(seeded(7), (microbatch, 0), 0) for microbatch in range(2)]
    found = {}
    other = threading.Thread(target=lambda: found.update(other=draw(seeded(7), (1, 0), 0)))

    part = RandomPart(seeded(7), 0, (0, 0))
    with part.around_forward():
        part.before_layer(0)
        other.start()
        other.join(0.05)  # it cannot end before its turn, however long it is waited for
        is_waiting = other.is_alive()
        found["own"] = torch.rand(4)
    other.join()

    assert is_waiting
    assert torch.equal(found["own"], expected[0])
    assert torch.equal(found["other"], expected[1])


def test_nobody_waits_for_a_turn_longer_than_the_deadline():
    with RandomPart(seeded(7), 0, (0, 0)).around_forward(), ThreadPoolExecutor() as threads:
        error = threads.submit(draw, seeded(7, max_wait_s=0.01), (0, 0), 0).exception()

    assert isinstance(error, DeadlineExceeded)
    assert "another rank of this process has drawn random numbers for 0.01 s" in str(error)
    assert error.waited_s == 0.01


def generator_stands_by_the_same_rule(device):
    randomness = seeded(7, device)
    default_generator(device).manual_seed(3)
    expected = torch.rand(4, device=device)
    default_generator(device).manual_seed(3)

    found = []
    for _ in range(2):
        part = RandomPart(randomness, 0, (0, 0))
        with part.around_forward():
            part.before_layer(0)
            found.append((torch.rand(4), torch.rand(4, device=device)))

    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(torch.rand(4, device=device), expected)


def test_the_generator_of_a_device_stands_by_the_same_rule(on_device):
    on_device(generator_stands_by_the_same_rule)
