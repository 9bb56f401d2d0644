"""What a layer makes and keeps is counted by storage: each once, what was there before apart. The tracker knows a saved
tensor from the moment that autograd takes it until it lets go."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.observing.layer_sizes import FIELDS, SavedTensorTracker, storages
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import on_ranks, settle, square_loss, values
from tests.support.own_weight_gradients import Building, Closing, Fused

FLOAT = 4
ROWS, WIDTH = 64, 256
"""Of a microbatch; wide enough for products to leave their weights for later."""


def sizes_of(
    make_layers,
    *,
    schedule="1f1b",
    num_ranks=1,
    split_backwards=False,
    optimizer=None,
    microbatches=2,
    num_steps=2,
    keywords=None,
):
    """Return the sizes that every rank gets, from the last of some steps."""
    inputs, target = (values(seed, microbatches * ROWS, WIDTH) for seed in (1, 2))

    def case(wires):
        order = build(schedule, ranks=num_ranks, microbatches=microbatches)
        pipeline = Pipeline(make_layers(), order, loss=square_loss, transport=wires)
        own = None if optimizer is None else optimizer(list(pipeline.parameters()))
        for _ in range(num_steps):
            report = pipeline.memory_report(
                inputs, target=target, optimizer=own, split_backwards=split_backwards, **keywords or {}
            )
            if own is not None:
                own.step()
                own.zero_grad()
        hooks = [len(layer._forward_hooks) for stage in pipeline.stages for layer in stage.layers.values()]
        pipeline.close()
        return report.layer_bytes, sum(hooks)

    found = on_ranks(num_ranks, case)
    assert all(sizes == found[0][0] for sizes, _ in found)
    assert tuple(found[0][0]) == FIELDS
    assert {len(entries) for entries in found[0][0].values()} == {len(make_layers())}
    assert all(num_hooks == 0 for _, num_hooks in found)
    return found[0][0]


def linears(count=2):
    return [settle(nn.Linear(WIDTH, WIDTH), seed) for seed in range(count)]


OUTPUT = FLOAT * ROWS * WIDTH
PARAMETERS = FLOAT * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_keeps_what_it_saves_but_no_parameters_and_nothing_of_the_batch(num_ranks):
    """A linear layer saves its input, which of the first one is the caller's; the loss saves a difference."""
    sizes = sizes_of(linears, num_ranks=num_ranks)

    assert sizes["activation_bytes"] == (0, OUTPUT + OUTPUT)
    assert sizes["message_bytes"] == (OUTPUT, OUTPUT)
    assert sizes["checkpoint_bytes"] == (0, OUTPUT)
    assert sizes["parameter_bytes"] == sizes["gradient_bytes"] == (PARAMETERS, PARAMETERS)


class Weighted(nn.Linear):
    def forward(self, hidden, *, factors):
        return super().forward(hidden) * factors


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_keywords_are_of_the_batch_also_where_a_layer_saves_them(num_ranks):
    """The first product's output is saved by nobody; the second layer's is saved by the loss."""

    def weighted():
        return [settle(Weighted(WIDTH, WIDTH), seed) for seed in range(2)]

    sizes = sizes_of(weighted, num_ranks=num_ranks, keywords={"factors": values(3, 2 * ROWS, WIDTH)})

    assert sizes["activation_bytes"] == (0, OUTPUT + OUTPUT)


def test_a_storage_that_is_saved_twice_counts_once_and_buffers_not_at_all():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("scale", torch.full((WIDTH,), 2.0))

        def forward(self, x):
            wide = x * self.weight
            return wide * wide * self.scale

    sizes = sizes_of(lambda: [Scaled()])

    assert sizes["activation_bytes"] == (OUTPUT + OUTPUT,)  # `wide`, and the difference of the loss


def test_what_weights_wait_for_is_measured_where_backwards_are_split():
    """Of each layer the gradient of its output, and its input: the first one's is the caller's."""
    assert sizes_of(linears)["weight_context_bytes"] == (0, 0)
    # The first report, which looks at what products save, does not change how their weights wait.
    assert sizes_of(linears, split_backwards=True, num_steps=1)["weight_context_bytes"] == (OUTPUT, 2 * OUTPUT)

    for options in ({"split_backwards": True}, {"schedule": "zb-h1", "num_ranks": 2}):
        sizes = sizes_of(linears, **options)
        assert sizes["weight_context_bytes"] == (OUTPUT, 2 * OUTPUT)


class Asking(torch.autograd.Function):
    """A product whose backward asks which half is wanted; it keeps twice the input as an attribute."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(weight)
        ctx.doubled, ctx.weight = hidden * 2, weight
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        of_hidden = gradient @ ctx.weight.t() if ps.wants_input_gradient(ctx) else None
        return of_hidden, ctx.doubled.t() @ gradient / 2 if ps.wants_weight_gradient(ctx) else None


class Custom(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width) / width)

    def forward(self, hidden):
        return Asking.apply(hidden, self.weight)


class Branching(Custom):
    def forward(self, hidden):
        return hidden + torch.tanh(torch.exp(self.weight))[0]


class Bounded(nn.Linear):
    """Makes its weight by two functions, each of which saves its result."""

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, torch.tanh(torch.sigmoid(self.weight)))


def test_what_functions_and_branches_hold_for_their_weights_is_measured_too():
    sizes = sizes_of(lambda: [*linears(1), Custom(WIDTH), Branching(WIDTH)], split_backwards=True)
    made = sizes_of(lambda: [*linears(1), settle(Bounded(WIDTH, WIDTH), 1)], split_backwards=True)

    matrix = FLOAT * WIDTH * WIDTH
    assert made["weight_context_bytes"][1] == 2 * OUTPUT + 2 * matrix
    # Of the first layer a gradient, of the function gradient and attribute, of the branch the gradient of a row and two
    # results that were saved.
    assert sizes["weight_context_bytes"] == (OUTPUT, 2 * OUTPUT, FLOAT * WIDTH + 2 * matrix)
    # Of the branch, too, the sum that the loss saves; of the first layer the batch, which is the caller's.
    assert sizes["activation_bytes"] == (0, OUTPUT, 2 * matrix + OUTPUT)


@pytest.mark.parametrize("kind", [Fused, Closing, Building])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_layers_leave_for_later_by_themselves_is_measured(kind, schedule):
    """Of each microbatch alone, although a queue has entries of several; the first layer's input is the caller's."""
    own = {"schedule": schedule, "num_ranks": 1 + (schedule == "zb-h1"), "split_backwards": schedule == "1f1b"}
    sizes = sizes_of(lambda: [settle(kind(width=WIDTH), seed) for seed in (0, 1)], microbatches=4, **own)

    assert sizes["weight_context_bytes"] == (OUTPUT, 2 * OUTPUT)


def test_a_shared_parameter_and_the_state_of_its_optimizer_belong_to_the_first_layer_that_has_it():
    def layers():
        first, second = linears()
        second.weight = first.weight
        return [first, second]

    sizes = sizes_of(layers, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9))

    assert sizes["parameter_bytes"] == sizes["optimizer_bytes"] == (PARAMETERS, FLOAT * WIDTH)


def test_copies_of_a_layer_count_once():
    sizes = sizes_of(linears, schedule="chimera", num_ranks=2, microbatches=4)

    assert sizes["parameter_bytes"] == (PARAMETERS, PARAMETERS)
    assert sizes["activation_bytes"] == (0, 2 * OUTPUT)


# ---- what autograd keeps


def attempt(act, *args):
    return act(*args)


def total(tracker, stage):
    return sum(tracker.bytes_by_address(stage).values())


@pytest.mark.parametrize(
    "end", [lambda outputs: outputs[0].sum().backward(), list.clear], ids=["backward", "without a backward"]
)
def test_what_a_forward_saves_is_held_until_its_backward_or_as_long_as_its_graph(end):
    """The tangent saves its own output."""
    tracker = SavedTensorTracker(note=list)

    with tracker.tracking(2, (), attempt):
        outputs = [torch.ones(5, requires_grad=True).tanh()]
    held = total(tracker, 2)
    end(outputs)

    assert (held, tracker.bytes_by_address(2)) == (FLOAT * 5, {})


def test_a_storage_saved_twice_or_seen_by_views_counts_once_and_until_all_are_gone():
    whole = torch.zeros(6)
    found = storages({"whole": whole, "half": [whole[:3]], "empty": torch.zeros(0), "other": torch.zeros(2)})
    assert sorted(found.values()) == [FLOAT * 2, FLOAT * 6]
    tracker, values = SavedTensorTracker(note=list), torch.ones(5, requires_grad=True)

    with tracker.tracking(0, (), attempt):
        first, second = values * values, values * 2 * values
    assert total(tracker, 0) == FLOAT * (5 + 5)
    del first
    assert total(tracker, 0) == FLOAT * (5 + 5)
    del second
    assert total(tracker, 0) == 0


def test_each_storage_that_is_new_to_a_stage_is_noted_once():
    noted = []
    tracker, inputs = SavedTensorTracker(note=noted.append), torch.ones(5, requires_grad=True)

    for num_noted in (2, 3):
        with tracker.tracking(0, (), attempt):
            outputs = [inputs.exp() * inputs if num_noted == 2 else inputs.exp()]
        assert len(noted) == num_noted
        outputs.clear()


class Attributed(torch.autograd.Function):
    """Saves its input and keeps it, a parameter and a number as attributes, as well as two tensors, one in a list."""

    @staticmethod
    def forward(ctx, features, weight):
        ctx.save_for_backward(features)
        ctx.features, ctx.weight, ctx.scale = features, weight, 2
        ctx.kept, ctx.listed = features * 2, [features * 3]
        return ctx.kept * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


def test_attributes_of_a_custom_function_are_held_as_long_as_its_node_unless_saved_too_or_parameters():
    noted, weight = [], nn.Parameter(torch.ones(5))
    tracker = SavedTensorTracker(note=noted.append)

    with tracker.tracking(1, storages([weight]), attempt):
        output = Attributed.apply(torch.ones(5), weight)
        tracker.note_functions(1, [output, 3])
        tracker.note_functions(1, {"again": output})

    assert (total(tracker, 1), len(noted)) == (3 * FLOAT * 5, 3)
    del output
    noted.clear()
    assert total(tracker, 1) == 0
