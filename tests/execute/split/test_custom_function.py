"""A custom function that asks which half is wanted computes its input gradients in I and its weight gradients in W."""

import gc
import weakref

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.lost_device import living_instances
from penstock.execute.split.custom_function import CustomFunction
from tests.execute.split.test_deferred_weights import any_size, assert_same, in_two_parts, left_by_input_part, two_parts
from tests.support.local_pipelines import WIDTH, settle, values
from tests.support.one_stage import run_weight_part
from tests.support.using import AskingProduct, Product, between, products

RUNS = []


def hidden():
    return values(1, 2, 3, WIDTH).requires_grad_()


def settled(use):
    """Return a layer that calls a function of activations and its own weights between two linear layers."""
    return settle(between(use), 1)


def seasoned(module, inputs):
    """The plan after some steps, which knows the module's functions."""
    plan = any_size()
    for _ in range(2):
        in_two_parts(module, inputs, plan)
    module.zero_grad()
    return plan


def wanted(ctx, gradient, *operands):
    """Return those gradients of a product that are wanted."""
    of_hidden, of_weight = products(gradient, *operands)
    return of_hidden if ps.wants_input_gradient(ctx) else None, of_weight if ps.wants_weight_gradient(ctx) else None


class Linear(torch.autograd.Function):
    """A linear layer that notes what it computes."""

    @staticmethod
    def forward(ctx, scale, hidden, weight, bias):
        ctx.save_for_backward(hidden, weight)
        ctx.scale = scale
        return torch.nn.functional.linear(hidden, weight, bias) * scale

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        gradient = gradient * ctx.scale
        of_hidden = of_weight = of_bias = None
        if ps.wants_input_gradient(ctx) and ctx.needs_input_grad[1]:
            RUNS.append("input")
            of_hidden = gradient @ weight
        if ps.wants_weight_gradient(ctx):
            RUNS.append("weight")
            rows = gradient.flatten(0, -2)
            of_weight = rows.t() @ hidden.flatten(0, -2)
            of_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return None, of_hidden, of_weight, of_bias


class OnlyOnce(Linear):
    """The same, differentiable once."""

    backward = staticmethod(once_differentiable(Linear.backward))


class NewStyle(torch.autograd.Function):
    """One with a context that is set up apart, several outputs, a tuple as attribute, and its own output saved."""

    @staticmethod
    def forward(hidden, weight, unused):
        product = hidden @ weight
        return torch.tanh(product), product.sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.operands = inputs[:2]
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, gradient, of_sum):
        (output,), (hidden, weight) = ctx.saved_tensors, ctx.operands
        gradient = gradient * (1 - output**2) + of_sum[..., None]
        RUNS.append([part for part in ("input", "weight") if getattr(ps, f"wants_{part}_gradient")(ctx)])
        return *wanted(ctx, gradient, hidden, weight), None


class Unmaterialized(torch.autograd.Function):
    """Gets None for an output that is not used, and has no gradient for one of its weights then."""

    @staticmethod
    def forward(ctx, hidden, first, second):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, first, second)
        return hidden @ first, hidden @ second

    @staticmethod
    def backward(ctx, *gradients):
        hidden, *weights = ctx.saved_tensors
        of_hidden, of_weights = None, [None, None]
        for place, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None:
                part, of_weights[place] = wanted(ctx, gradient, hidden, weight)
                of_hidden = part if of_hidden is None or part is None else of_hidden + part
        return of_hidden, *of_weights


class Wrong(Product):
    """Asks, and computes everything all the same; its gradients have to be summed to the shape of the bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias):
        return Product.forward(ctx, hidden, weight) + bias

    @staticmethod
    def backward(ctx, gradient):
        ps.wants_weight_gradient(ctx)
        return *Product.backward(ctx, gradient), gradient


class Silent(Product):
    """Never asks."""

    @staticmethod
    def backward(ctx, gradient):
        RUNS.append("silent")
        return Product.backward(ctx, gradient)


class Automatic(AskingProduct):
    """Runs under autocast as torch has it for custom functions."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.bfloat16))
    backward = staticmethod(torch.amp.custom_bwd(AskingProduct.backward, device_type="cpu"))


class Mapped(AskingProduct):
    """Runs under vmap, which makes a new function of it in each forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden, weight):
        return hidden @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


def under_autocast(self, hidden):
    with torch.autocast("cpu", torch.bfloat16):
        return Automatic.apply(hidden, self.first).to(hidden.dtype)


def recomputed(self, hidden):
    return checkpoint(lambda x: Linear.apply(2, x, self.first, self.vector), hidden, use_reentrant=False)


def with_both_outputs(self, hidden):
    one, two = NewStyle.apply(hidden, self.first, None)
    return one * two[..., None]


USES = {
    "linear": lambda self, x: Linear.apply(2, x, self.first, self.vector),
    "without bias": lambda self, x: Linear.apply(2, x, self.first, None),
    "differentiable once": lambda self, x: OnlyOnce.apply(2, x, self.first, self.vector),
    "a weight made of parameters": lambda self, x: Linear.apply(
        2, x, torch.tanh(self.first) @ self.second, self.vector
    ),
    "twice": lambda self, x: Linear.apply(3, Linear.apply(2, x, self.first, self.vector), self.first, self.vector),
    "two outputs": with_both_outputs,
    "one of two outputs": lambda self, x: NewStyle.apply(x, self.first, None)[0],
    "without zeros": lambda self, x: sum(Unmaterialized.apply(x, self.first, self.second)),
    "without zeros, one of two outputs": lambda self, x: Unmaterialized.apply(x, self.first, self.second)[1],
    "a frozen weight": lambda self, x: Linear.apply(2, x, self.first.detach(), self.vector),
    "a bias that is used elsewhere too": lambda self, x: Linear.apply(2, x, self.first, self.vector) + self.vector,
    "inputs without gradient": lambda self, x: Linear.apply(2, x.detach(), self.first, self.vector) + x,
    "under autocast": under_autocast,
    "under vmap": lambda self, x: torch.vmap(Mapped.apply, (0, None))(x, self.first),
    "recomputed": recomputed,
    "never asks": lambda self, x: Silent.apply(x, self.first),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", USES)
def test_both_parts_are_the_whole_backward_bit_for_bit(name, dtype):
    assert_same(settled(USES[name]).to(dtype), values(1, 2, 3, WIDTH, dtype=dtype))


def notes_of(run):
    RUNS.clear()
    run()
    return list(RUNS)


@pytest.mark.feature("X18")
@pytest.mark.parametrize(
    ("name", "early", "late"),
    [
        ("linear", ["input"], ["weight"]),
        ("a weight made of parameters", ["input"], ["weight"]),
        ("twice", ["input"] * 2, ["weight"] * 2),
        ("two outputs", [["input"]], [["weight"]]),
        ("inputs without gradient", [], ["weight"]),
        ("recomputed", ["input", "weight"], []),
        ("a bias that is used elsewhere too", ["input", "weight"], []),
        ("never asks", ["silent"], []),
    ],
)
def test_each_part_computes_its_half(name, early, late):
    module, inputs = settled(USES[name]), hidden()

    run_input, run_weight = two_parts(module, inputs, seasoned(module, inputs))

    assert (notes_of(run_input), notes_of(run_weight)) == (early, late)


def test_a_function_is_known_to_ask_from_the_next_step_on():
    class New(Linear):
        """One that has not run yet."""

    module = settled(lambda self, x: New.apply(2, x, self.first, self.vector))
    found, plan = [], any_size()
    for _ in range(3):
        run_input, run_weight = two_parts(module, hidden(), plan)
        found.append((notes_of(run_input), notes_of(run_weight), plan.is_settled))

    assert found == [(["input", "weight"], [], False), *[(["input"], ["weight"], True)] * 2]


def test_a_gradient_that_was_not_wanted_is_dropped_and_said_once(told_warnings):
    assert_same(settled(lambda self, x: Wrong.apply(x, self.first, self.vector)), values(1, 2, 3, WIDTH))

    texts = told_warnings()
    assert len(texts) == 3
    assert "Wrong.backward: in the `I` of a split backward it returned a gradient for its argument `weight`" in texts[0]
    assert "`bias`" in texts[1]
    assert "ps.wants_weight_gradient(ctx) is False" in texts[0]
    assert "in the `W`" in texts[2]
    assert "its argument `hidden`" in texts[2]
    assert "ps.wants_input_gradient(ctx) is False" in texts[2]


def test_functions_that_each_forward_makes_anew_are_forgotten():
    module, plan = settled(USES["under vmap"]), any_size()
    for _ in range(4):
        in_two_parts(module, hidden(), plan)

    gc.collect()
    functions = living_instances(type(Mapped))
    assert len([each for each in functions if each.__name__ == "VmappedMapped"]) < 4


def left_for_w(module):
    """Return what a backward leaves for W by a plan that knows the module, and the function in it."""
    deferred = left_by_input_part(module, hidden(), seasoned(module, hidden()))
    (function,) = [each for each in deferred.entries if isinstance(each, CustomFunction)]
    return deferred, function


def test_what_is_kept_for_w_is_known_and_freed():
    module = settled(USES["two outputs"])
    run_weight_part(left_for_w(module)[0])
    gc.collect()
    gc.disable()
    try:
        deferred, function = left_for_w(module)
        shapes = sorted(tuple(each.shape) for each in function.held_tensors)
        memory = [weakref.ref(each.untyped_storage()) for each in function.held_tensors]
        run_weight_part(deferred)

        assert (function.held_tensors, function.node) == ([], None)
        assert [each() for each in memory] == [None] * len(memory)
    finally:
        gc.enable()
    assert shapes == [(2, 3), *[(2, 3, WIDTH)] * 3]  # two gradients, the output that was saved, the hidden attribute


def test_a_saved_tensor_that_is_changed_in_place_before_w_is_named():
    deferred, function = left_for_w(settled(lambda self, x: Linear.apply(2, x.detach() + x, self.first, self.vector)))
    function.ctx.saved_tensors[0].add_(1)

    with pytest.raises(PipelineError, match=r"Linear: a tensor of shape \(2, 3, 6\) .* at version 1, expected 0"):
        run_weight_part(deferred)


class Short(Linear):
    """Returns nothing but the gradient that is wanted."""

    @staticmethod
    def backward(ctx, gradient):
        of_scale, of_hidden, of_weight, of_bias = Linear.backward(ctx, gradient)
        return (of_scale, of_hidden, of_weight, of_bias) if ps.wants_input_gradient(ctx) else of_weight


def test_too_few_gradients_are_counted():
    module, plan = settled(lambda self, x: Short.apply(2, x, self.first, self.vector)), any_size()
    in_two_parts(module, hidden(), plan)  # from the next step on it is known to ask

    with pytest.raises(PipelineError, match=r"Short.backward: in the `W` .* returned 1 gradients, expected 4"):
        in_two_parts(module, hidden(), plan)
