"""Activations that programs move to the host and back leave every bit as it is."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import penstock as ps
from penstock.schedules import FAMILIES
from tests.acceptance.slices.test_carried_steps import CarriedAttention, CarriedGRU, OnceInAWhile, RunningSum
from tests.acceptance.steps.test_recomputed_steps import assert_same
from tests.acceptance.steps.test_skip_steps import LookingBack, Recomputed, TreeLayer
from tests.acceptance.steps.test_skip_steps import layers as skipping_layers
from tests.exactness.combinations import schedule_of
from tests.exactness.features import LOSSES, MODELS, batch, options
from tests.execute.test_overlap import InTwoThreads, backward_first
from tests.proofs.tables import schedule_of as drawn
from tests.random_models.wrappers import RECOMPUTING
from tests.support.local_pipelines import WIDTH, block, gradients_of, on_ranks, settle, square_loss, values

FLOAT64 = torch.float64
TRAINING = [name for name in FAMILIES if name != "forward-only"]
SHAPES = [(4, 8), (3, 6), (2, 6), (1, 6)]
WITH_R = {False: lambda schedule: schedule, True: ps.with_recompute}
GPIPE = partial(ps.build, "gpipe", ranks=1)
FEATURES = [name for name in MODELS if name != "variable length"]
SPLIT = drawn("0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3")
PAIRS = drawn(
    "0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B (0F4;0B1)OVERLAP_F_B 0B2 0B3 0B4\n"
    "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B (1F4;1B3)OVERLAP_F_B 1B4"
)


def copies(program):
    """The texts of all copies, rank by rank."""
    return [text for rank in range(program.num_ranks) for row in program[rank] if "LOAD" in (text := str(row))]


def moving(schedule):
    """The program that moves what every stage keeps."""
    return ps.lower(schedule, offload=range(schedule.num_stages))


def trained(wires, plan, make_layers, make_batch, loss, more):
    """Train two steps, evaluate once; return all that a user may see, and the tied groups."""
    pipeline = ps.Pipeline(make_layers(), plan, loss=loss, transport=wires, **more)
    optimizer, found = torch.optim.SGD(pipeline.parameters(), lr=0.05), []
    for step in range(2):
        inputs, target = make_batch(step)
        result = pipeline.step(inputs, target=target, return_outputs=True)
        gradients = gradients_of(pipeline.named_parameters())
        found += [result.loss, result.losses, result.outputs, list(result.named_losses.values()), gradients]
        optimizer.step()
        optimizer.zero_grad()
    evaluated = pipeline.evaluate(make_batch(2)[0], target=make_batch(2)[1], return_outputs=True)
    found += [evaluated.loss, evaluated.losses, evaluated.outputs]
    layers = nn.ModuleList(layer for stage in pipeline.stages for layer in stage.layers.values())
    found += [{name: buffer.clone() for name, buffer in layers.named_buffers()}]
    groups = pipeline.program.tied_groups
    pipeline.close()
    return found, groups


def assert_moves_change_nothing(schedule, make_layers, make_batch, loss=square_loss, stages=None, **more):
    run = partial(on_ranks, schedule.num_ranks, trained)
    plain = run(schedule, make_layers, make_batch, loss, more)
    stages = range(schedule.num_stages) if stages is None else stages
    program = ps.lower(schedule, tied_groups=plain[0][1], offload=stages)
    assert copies(program)
    assert_same([seen for seen, _ in run(program, make_layers, make_batch, loss, more)], [seen for seen, _ in plain])


def assert_feature_is_the_same(schedule, feature, loss, **more):
    more |= options(feature, loss) | ({"compile": "aot_eager"} if feature == "compiled" else {})
    make_layers = partial(MODELS[feature], max(4, len(schedule.placement.routes[0])))
    make_batch = partial(batch, feature, loss, schedule.num_microbatches)
    assert_moves_change_nothing(schedule, make_layers, make_batch, LOSSES[loss][0], **more)


def numbers(*shape, dtype=torch.float32):
    """Batches of this shape, another one at each step."""
    return lambda step: (values(step, *shape, dtype=dtype), values(step + 100, *shape, dtype=dtype))


def moved_schedule(name):
    """The first shape of a family in which something is moved; None if there is none."""
    found = (schedule_of(name, *shape) for shape in SHAPES)
    return next((each for each in found if each is not None and copies(moving(each))), None)


# ---- what is trained


QUICK = ("sequential", "1f1b", "zbv", "interleaved-1f1b", "dualpipe", "seq1f1b", "hanayo")
BY_FAMILY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in TRAINING]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_FAMILY)
def test_every_family_trains_the_same(name):
    if (schedule := moved_schedule(name)) is None:
        assert name == "sequential"  # a backward follows its forward at once
        return
    index = TRAINING.index(name)
    assert_feature_is_the_same(schedule, FEATURES[index % len(FEATURES)], list(LOSSES)[index % 3])
    some = range(index % 2, schedule.num_stages, 2)
    if copies(ps.lower(ps.with_recompute(schedule), offload=some)):
        assert_feature_is_the_same(ps.with_recompute(schedule), "dropout", "token", stages=some)


BY_FEATURE = [
    pytest.param(name, feature, again, marks=() if again == (number + place) % 2 else pytest.mark.full)
    for number, name in enumerate(["1f1b", "zb-h1", "dualpipe"])
    for place, feature in enumerate(FEATURES)
    for again in WITH_R
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "feature", "again"), BY_FEATURE)
def test_every_feature_trains_the_same(name, feature, again):
    schedule = ps.build(name, ranks=2, microbatches=8)

    assert_feature_is_the_same(WITH_R[again](schedule), feature, "token")


class OncePerRank:
    """Makes a hook for each rank: two ranks that share two threads wait for each other."""

    def __init__(self, make):
        self.make = make
        self.of_rank = threading.local()

    def __call__(self, first, second):
        if not hasattr(self.of_rank, "hook"):
            self.of_rank.hook = self.make()
        self.of_rank.hook(first, second)


@pytest.mark.parametrize(
    ("schedule", "make_overlap", "again"),
    [
        (PAIRS, None, False),
        (PAIRS, lambda: backward_first, True),
        (PAIRS, InTwoThreads, False),
        pytest.param(ps.build("dualpipe-v", ranks=2, microbatches=8), InTwoThreads, True, marks=pytest.mark.slow),
    ],
    ids=["no", "order", "threads", "v"],
)
def test_overlapped_pairs_train_the_same_in_order_and_by_hook(schedule, make_overlap, again):
    more = {"overlap": OncePerRank(make_overlap)} if make_overlap else {}

    assert_feature_is_the_same(WITH_R[again](schedule), "plain", "mean", **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [RunningSum, CarriedGRU, CarriedAttention, OnceInAWhile], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("again", WITH_R, ids="again={}".format)
def test_slices_that_carry_state_train_the_same(kind, again):
    schedule = ps.build("seq1f1b", ranks=2, microbatches=4, slices=3)

    def layers():
        return [layer for seed in range(2) for layer in (block(50 + seed, FLOAT64), kind(seed))]

    more = {"allow_ragged": True, "debug": "values"}
    assert_moves_change_nothing(WITH_R[again](schedule), layers, numbers(8, 7, WIDTH, dtype=FLOAT64), **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TreeLayer, Recomputed, LookingBack], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["1f1b", "zbv", "seq1f1b"])
def test_skips_train_the_same(name, kind):
    schedule = ps.build(name, ranks=2, microbatches=6, **({"slices": 2} if name == "seq1f1b" else {}))

    assert_moves_change_nothing(schedule, partial(skipping_layers, kind, 5), numbers(12, 6, WIDTH, dtype=FLOAT64))


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_a_file_with_such_a_program_trains_the_same(suffix, tmp_path):
    schedule = ps.build("1f1b", ranks=2, microbatches=6)
    program, path = moving(schedule), tmp_path / f"program.{suffix}"
    path.write_text(program.to_json() if suffix == "json" else program.to_csv())

    def run(wires, plan):
        return trained(wires, plan, lambda: [block(seed) for seed in range(4)], numbers(12, WIDTH), square_loss, {})

    assert_same(on_ranks(2, run, path), on_ranks(2, run, schedule))


class Viewing(nn.Linear):
    """Saves views of one storage with strides and offsets of their own, and one of them twice."""

    def forward(self, x):
        first, second = super().forward(x).tanh().chunk(2, -1)
        turned = (first * second).transpose(0, -1)
        wide = (turned * turned).sum(0, keepdim=True).expand(turned.shape) * turned[..., ::2].repeat_interleave(2, -1)
        return torch.cat([first, second * first[:, :1]], -1) * wide.transpose(0, -1).sum(-1, keepdim=True)


class Sizes(nn.Linear):
    """Saves scalars, empty tensors, bools and whole numbers."""

    def forward(self, x):
        x = super().forward(x)
        x = x * x.mean().sigmoid() + (x[:0].exp() * x[:0]).sum()
        return torch.where(x > 0, x, x.sort(-1).values) + x.max(-1, keepdim=True).values * x.norm()


class Complex(nn.Linear):
    """Saves complex numbers, and their conjugate and imaginary part that are views with a bit set."""

    def forward(self, x):
        waves = torch.fft.fft(super().forward(x).tanh())
        return (waves * waves.conj()).real * waves.conj().imag


class Sparse(nn.Linear):
    """Saves a sparse tensor, that has no storage."""

    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x), dtype=x.dtype).to_sparse(), super().forward(x)).tanh()


class ForwardMode(nn.Linear):
    """Saves zeros of forward mode, that have no storage."""

    def forward(self, x):
        return torch.func.jvp(lambda given: super(ForwardMode, self).forward(given).tanh(), (x,), (x.detach(),))[1]


class InPlace(nn.Linear):
    """Changes in place what is not saved yet, and saves a result after that."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("shift", torch.arange(args[1], dtype=kwargs.get("dtype")))

    def forward(self, x):
        return super().forward(x).mul_(self.shift).relu_().square().add_(1).rsqrt()


class OnCpu(nn.Linear):
    """Saves under hooks of its own."""

    def forward(self, x):
        with save_on_cpu():
            hidden = super().forward(x).tanh()
        return hidden * hidden


class LowPrecision(nn.Linear):
    """Computes in bfloat16, by autocast."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).tanh().to(x.dtype)


class Square(torch.autograd.Function):
    """Saves its input in two ways, and its output."""

    @staticmethod
    def forward(ctx, x):
        output = x * x
        ctx.save_for_backward(x, output, x.detach().t(), None)
        ctx.aside = x.detach().cos()
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, output, turned, nothing = ctx.saved_tensors
        assert nothing is None
        assert (turned.t() == x).all()
        return gradient * 2 * x * torch.sign(output) + 0 * ctx.aside


class Function(nn.Linear):
    """Runs a function of the user's own."""

    def forward(self, x):
        return Square.apply(super().forward(x).tanh())


LAYERS = [Viewing, Sizes, InPlace, OnCpu, LowPrecision, Function]
IN_DTYPES = [(kind, FLOAT64) for kind in (*LAYERS, Complex, Sparse, ForwardMode)] + [
    (kind, torch.bfloat16) for kind in LAYERS
]
PLANS = {
    "gpipe": GPIPE(microbatches=4),
    "recomputed": GPIPE(microbatches=4, recompute=True),
    "split": SPLIT,
    "2 ranks": ps.build("1f1b", ranks=2, microbatches=6),
}


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in ("recomputed", "split") else pytest.mark.slow) for plan in PLANS]
)
@pytest.mark.parametrize(("kind", "dtype"), IN_DTYPES)
def test_saved_tensors_of_every_form_come_back_as_they_were(kind, dtype, plan):
    if kind is ForwardMode and PLANS[plan].num_ranks > 1:
        return  # torch has one level of forward mode for all threads

    def layers():
        return [settle(kind(6, 6, dtype=dtype), seed) for seed in range(4)]

    assert_moves_change_nothing(PLANS[plan], layers, numbers(24, 6, dtype=dtype))


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "split" else pytest.mark.slow) for plan in PLANS]
)
@pytest.mark.parametrize("wrapper", RECOMPUTING)
@pytest.mark.parametrize("kind", [Viewing, InPlace, Function], ids=lambda kind: kind.__name__)
def test_checkpointed_layers_train_the_same(kind, wrapper, plan):
    if (kind, wrapper) == (InPlace, "selective"):
        return  # what it changes is a product, which must be saved

    def layers():
        return [RECOMPUTING[wrapper](settle(kind(6, 6), seed)) if seed % 2 else block(seed) for seed in range(4)]

    assert_moves_change_nothing(PLANS[plan], layers, numbers(24, 6))


def test_stages_may_come_in_any_collection_and_twice():
    schedule = ps.build("seq1f1b", ranks=3, microbatches=4, slices=2)
    program = ps.lower(schedule, offload=[1])

    assert ps.lower(schedule, offload=np.array([1])) == ps.lower(schedule, offload=iter([1, 1])) == program
    assert {text[0] for text in copies(program)} == {"1"}
    assert program.actions() == schedule


@pytest.mark.feature("H1")
@pytest.mark.parametrize("more", [{}, {"one_stream": True}, {"messages": "rendezvous"}])
@pytest.mark.parametrize("again", WITH_R)
def test_a_pipeline_moves_what_its_option_says_and_evaluates_as_ever(more, again):
    make_batch = numbers(16, WIDTH, dtype=FLOAT64)
    make_layers = lambda: [block(seed, FLOAT64) for seed in range(4)]  # noqa: E731  # one line
    schedule = WITH_R[again](ps.build("1f1b", ranks=4, microbatches=8))
    run = partial(on_ranks, 4, trained)

    moved = run(schedule, make_layers, make_batch, square_loss, {"offload": [0, 1], **more})
    plain = run(schedule, make_layers, make_batch, square_loss, {})

    assert_same([seen for seen, _ in moved], [seen for seen, _ in plain])


@pytest.mark.feature("H1")
def test_the_program_of_a_pipeline_has_the_copies_of_its_option():
    layers = [settle(nn.Linear(WIDTH, WIDTH), seed) for seed in range(2)]
    with ps.Pipeline(layers, ps.build("gpipe", ranks=1, microbatches=4), loss=square_loss, offload=[0]) as pipeline:
        assert copies(pipeline.program)[:3] == ["0OFFLOAD0", "0OFFLOAD1", "0OFFLOAD2"]
