"""A layout that ran once holds for every later batch of its signature, until it is forgotten."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.transport.agreed_layouts import MAX_LAYOUTS, AgreedLayouts
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, error_of, float_layers, on_ranks, square_loss, values, zero
from tests.support.using import Using

FIRST, SECOND = (1, 0, 0), (2, 0, 0)


def step_of(layouts, signature, outputs):
    layouts.begin(signature)
    for key, output in outputs.items():
        layouts.note_outputs(key, output, f"{key[0]}F{key[1]}")
    layouts.finish()


def test_a_step_that_did_not_end_leaves_no_layout():
    layouts = AgreedLayouts(0, has_variable_shapes=False)
    layouts.begin("batch")
    layouts.note_outputs(FIRST, torch.zeros(2), "1F0")

    layouts.begin("batch")

    assert not layouts.is_static
    assert layouts.produced == {}


def to_jagged(self, x):
    """Make rows a jagged nested tensor of two, cut at another place in every step."""
    self.cut = self.cut % 2 + 1
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, self.cut, len(x)]))


def jagged_layers():
    first, second, third = float_layers(num_layers=3)
    to_rows = Using(lambda self, x: x.values())
    return [nn.Sequential(first, Using(to_jagged, cut=0)), second[0], third[0], to_rows]


def test_jagged_tensors_pass_between_the_stages_of_a_rank_in_every_step():
    def case(wires):
        layers, gradients = jagged_layers(), []
        with Pipeline(layers, "zbv", 2, square_loss, transport=wires) as pipeline:
            for seed, record in ((1, False), (2, False), (3, True)):
                pipeline.step(values(seed, 8, WIDTH), target=values(9, 8, WIDTH), record=record)
                gradients.append([param.grad.clone() for param in pipeline.parameters()])
                zero(pipeline)
            return gradients, pipeline.timeline.message_bytes

    ((gradients, message_bytes),) = on_ranks(1, case)

    assert set(message_bytes) == {0}  # nothing of them leaves the rank
    for seed, gradients_of_step in zip((1, 2, 3), gradients, strict=True):
        layers = nn.Sequential(*jagged_layers())
        square_loss(layers(values(seed, 8, WIDTH)), values(9, 8, WIDTH)).backward()
        for param, gradient in zip(layers.parameters(), gradients_of_step, strict=True):
            torch.testing.assert_close(gradient, param.grad)


def test_a_jagged_tensor_that_goes_to_another_rank_is_refused_by_name():
    def case(wires):
        with Pipeline(jagged_layers(), "1f1b", 2, square_loss, transport=wires) as pipeline:
            return str(error_of(pipeline.step, values(1, 8, WIDTH), target=values(9, 8, WIDTH)))

    assert all("value is a tensor of layout torch.jagged" in error for error in on_ranks(2, case))


def test_of_a_stage_the_largest_output_counts():
    layouts = AgreedLayouts(0, has_variable_shapes=True)
    outputs = {(1, 1, 0): (torch.zeros(3), 7), FIRST: torch.zeros(2), SECOND: torch.zeros(1, dtype=torch.float64)}

    step_of(layouts, "batch", outputs)

    assert layouts.output_bytes() == {1: 12, 2: 8}


@pytest.mark.parametrize(
    ("before", "after", "names_autocast"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), True),
        ((torch.zeros(2, dtype=torch.float16), 3), (torch.zeros(2), 3), True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), False),
        (torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16), False),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), False),
        ((torch.zeros(2), "a"), (torch.zeros(2), "b"), False),
    ],
)
def test_outputs_that_differ_in_a_floating_point_type_alone_point_at_autocast(before, after, names_autocast):
    layouts = AgreedLayouts(0, has_variable_shapes=False)
    step_of(layouts, "batch", {FIRST: before})

    error = error_of(step_of, layouts, "batch", {FIRST: after})

    assert isinstance(error, PipelineError)
    assert ("Run every step within torch.autocast of the same type, or none" in str(error)) is names_autocast
    assert str(error).endswith("; or create the pipeline with variable_shapes=True")


# ---- by the kind of microbatch


def step_of_kinds(layouts, signature, kinds, output_of=lambda index: torch.zeros(2)):
    """Run a step of one stage with microbatches of these kinds; return whether its layouts were known."""
    layouts.begin(signature, kinds)
    was_known = layouts.is_static
    for index in range(len(kinds)):
        layouts.note_outputs((1, index, 0), output_of(index), f"1F{index}")
    layouts.finish()
    return was_known


def test_another_number_of_known_microbatches_is_known():
    layouts = AgreedLayouts(0, has_variable_shapes=False)

    known = [step_of_kinds(layouts, str(kinds), kinds) for kinds in ("aa", "aaaa", "aab", "b", "aba", "aa")]

    assert known == [False, True, False, True, True, True]
    assert layouts.are_alike
    assert len(layouts.produced) == 2


def test_without_kinds_each_batch_is_learnt():
    layouts = AgreedLayouts(0, has_variable_shapes=False)
    step_of(layouts, "two", {FIRST: torch.zeros(2)})

    layouts.begin("three")

    assert not layouts.is_static
    assert layouts.knows("two")
    assert not layouts.knows("three")


def test_microbatches_of_a_kind_that_differ_are_noticed_until_all_is_forgotten():
    layouts = AgreedLayouts(0, has_variable_shapes=False)

    assert not step_of_kinds(layouts, "two", "aa", lambda index: torch.zeros(2 + index))
    assert not layouts.are_alike
    layouts.forget()

    assert layouts.are_alike
    assert not step_of_kinds(layouts, "three", "aaa")


def test_the_kinds_that_ran_last_are_remembered():
    layouts = AgreedLayouts(0, has_variable_shapes=False)
    for number in range(MAX_LAYOUTS + 1):
        step_of_kinds(layouts, f"batch {number}", [f"kind {max(number, 1)}", "kind 0"])

    assert step_of_kinds(layouts, "known", ["kind 0", "kind 2"])
    assert not step_of_kinds(layouts, "forgotten", ["kind 1"])
