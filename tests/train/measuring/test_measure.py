"""Layers are measured one by one as they are executed, nothing is left behind, and the split follows what they take."""

from functools import partial
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError, PartitionError, PipelineError
from penstock.models import LayerSpec, Skip
from penstock.models.auxiliary import AuxiliaryLoss
from penstock.partition.split import split_layers
from penstock.pipeline import Pipeline
from penstock.train.measuring.measure import LayerTimes, measure_layers
from tests.support.local_pipelines import error_of, on_ranks, square_loss

WIDTH = 3


class FakeClock:
    """Time goes on only where somebody sleeps."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, clock, duration_s):
        ctx.sleep = partial(clock.sleep, 2 * duration_s)
        clock.sleep(duration_s)
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.sleep()
        return gradient, None, None


class Sleeper(nn.Module):
    """Takes some time forward and twice as much backward."""

    def __init__(self, clock, duration_s):
        super().__init__()
        self.clock, self.duration_s = clock, duration_s
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return Sleep.apply(self.layer(features), self.clock, self.duration_s)


def batch(rows=2):
    return torch.ones(rows, WIDTH)


def sleepers(clock, *durations_s):
    return [Sleeper(clock, duration_s) for duration_s in durations_s]


@pytest.mark.feature("X28")
def test_a_layer_that_sleeps_three_times_as_long_gets_three_times_the_weight_and_the_split_follows():
    clock = FakeClock()
    layers = sleepers(clock, 3.0, 1.0, 1.0, 1.0)

    times = measure_layers(layers, (batch(),), clock=clock)

    assert times == LayerTimes(("0", "1", "2", "3"), (3.0, 1.0, 1.0, 1.0), (6.0, 2.0, 2.0, 2.0))
    assert times.weights == (9.0, 3.0, 3.0, 3.0)
    assert [len(part) for part in split_layers(4, 2, weights=times.weights)] == [1, 3]
    with Pipeline(layers, "1f1b", 2, square_loss, weights=times.weights) as pipeline:
        assert pipeline.layer_weights == times.weights


def test_the_median_counts_so_that_one_slow_round_does_not():
    clock = FakeClock()
    layer = Sleeper(clock, 1.0)
    rounds = iter([50.0, 1.0, 1.0, 90.0])  # the first one warms up
    layer.register_forward_pre_hook(lambda *_: setattr(layer, "duration_s", next(rounds)))

    times = measure_layers([layer], (batch(),), num_rounds=3, clock=clock)

    assert (times.forward_s, times.backward_s) == ((1.0,), (2.0,))


def test_the_loss_is_part_of_the_last_layer_gives_a_sum_and_its_weight_and_is_told_its_factor():
    clock, told = FakeClock(), []

    def loss(output, target, *, weight):
        told.append(weight)
        return square_loss(Sleep.apply(output, clock, 10.0), target), target.numel()

    times = measure_layers(sleepers(clock, 1.0, 1.0), (batch(),), target=batch(), loss=loss, num_rounds=1, clock=clock)

    assert (times.forward_s, times.backward_s) == ((1.0, 11.0), (2.0, 22.0))
    assert told == [1.0, 1.0]


@pytest.mark.parametrize(
    ("frozen", "backward_s"), [(0, (0.0, 2.0)), (1, (2.0, 2.0))], ids=["in front", "behind trained ones"]
)
def test_frozen_layers_have_a_backward_only_where_they_hand_gradients_back(frozen, backward_s):
    clock = FakeClock()
    layers = sleepers(clock, 1.0, 1.0)
    layers[frozen].requires_grad_(False)

    assert measure_layers(layers, (batch(),), clock=clock).backward_s == backward_s


def test_gradients_buffers_and_random_numbers_stay_as_they_are():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    kept = torch.full((WIDTH,), 7.0)
    layer[1].bias.grad = kept
    state, drawn = {name: value.clone() for name, value in layer.state_dict().items()}, torch.get_rng_state()

    measure_layers([layer], (batch(),), num_rounds=2)

    assert layer[1].bias.grad is kept
    assert kept.tolist() == [7.0] * WIDTH
    assert layer[0].weight.grad is None
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_layer_is_built_only_while_it_is_measured():
    alive = WeakSet()

    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            alive.add(self)

        def forward(self, features):
            assert len(alive) == 1
            return super().forward(features)

    specs = [LayerSpec(name, Counted) for name in ("first", "second", "third")]

    assert measure_layers(specs, (batch(),), num_rounds=1).names == ("first", "second", "third")
    assert not alive


class Down(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.layer, self.skip, self.clock = nn.Linear(WIDTH, WIDTH), Skip("down"), clock

    def forward(self, features):
        features = self.layer(features)
        self.skip.put(Sleep.apply(features, self.clock, 1.0))
        return features


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.skip = nn.Linear(WIDTH, WIDTH), Skip("down")

    def forward(self, features):
        return checkpoint(lambda hidden: self.layer(hidden * self.skip.get()), features, use_reentrant=False)


def test_skips_reach_the_layers_that_get_them_and_their_backward_counts():
    clock = FakeClock()
    layers = [Down(clock), nn.Linear(WIDTH, WIDTH), Up()]

    assert measure_layers(layers, (batch(),), clock=clock).backward_s == (2.0, 0.0, 0.0)


def test_what_layers_add_to_the_loss_counts_and_is_forgotten_and_keywords_reach_them():
    clock = FakeClock()

    class Router(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.balance = AuxiliaryLoss("balance")

        def forward(self, features, scale):
            self.balance.add(Sleep.apply(self.weight, clock, scale).sum())
            return super().forward(features)

    router = Router()

    assert measure_layers([router], (batch(),), {"scale": 1.0}, clock=clock).backward_s == (2.0,)
    assert router.balance.take() is None
    router(batch(), scale=1.0)
    assert router.balance.take() is not None


def test_all_ranks_get_the_times_of_the_first_and_if_it_fails_all_do_and_the_others_say_why():
    clocks = [FakeClock(), FakeClock()]

    def measure(transport):
        clock = clocks[transport.rank]
        return measure_layers(sleepers(clock, 1.0, 2.0), (batch(),), transport=transport, clock=clock)

    def fail(transport):
        return error_of(measure_layers, [lambda: "no module"], (batch(),), transport=transport)

    assert on_ranks(2, measure) == [LayerTimes(("0", "1"), (1.0, 2.0), (2.0, 4.0))] * 2
    assert clocks[1].now_s == 0.0

    first, second = on_ranks(2, fail)
    assert isinstance(first, PartitionError)
    assert "layer '0' builds a str" in str(first)
    assert (type(second), second.rank) == (PipelineError, 0)
    assert "rank 1: rank 0 could not measure the layers" in str(second)
    assert str(first) in str(second)


@pytest.mark.parametrize(
    ("layers", "options", "kind", "text"),
    [
        ([], {}, PartitionError, "no layers to measure"),
        ([nn.Identity()], {"num_rounds": 0}, ConfigError, "num_rounds: 0 is out of range"),
    ],
)
def test_what_cannot_be_measured_is_refused(layers, options, kind, text):
    with pytest.raises(kind, match=text):
        measure_layers(layers, (batch(),), **options)
