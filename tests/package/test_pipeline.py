"""The object a training loop holds: exact against one process, alike on threads and on gloo, honest about mistakes."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PartitionError, PenstockWarning, PipelineError, StepRefused
from penstock.execute.lost_device import living_instances
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.schedules import build
from penstock.simulation import LayerCosts
from tests.support.local_pipelines import (
    WIDTH,
    Masked,
    Outcome,
    Task,
    assert_errors,
    assert_gradients,
    block,
    difference,
    differences_on_gloo,
    error_of,
    errors_before_a_right_step,
    float_layers,
    float_task,
    gradients_of,
    named,
    on_pipelines,
    on_ranks,
    pipeline_of,
    run_task,
    settle,
    square_loss,
    step_task,
    token_task,
    values,
    zero,
)
from tests.support.mesh_pipelines import on_mesh
from tests.support.reference import reference_evaluate, reference_step

IN_ORDER = [("sequential", {}), ("gpipe", {}), ("1f1b", {}), ("1f1b", {"warmup": "eager"})]
NAMES = ["sequential", "gpipe", "1f1b", "1f1b-eager"]


def tasks_of(cell, num_microbatches):
    """Both models, both types: every second cell the other way round."""
    first, second = (torch.float32, torch.float64) if cell % 2 else (torch.float64, torch.float32)
    return [float_task(2 * num_microbatches, first), token_task(2 * num_microbatches + 1, second)]


# ---- exactness


@pytest.mark.feature("A1", "D3", "E1")
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "options"), IN_ORDER, ids=NAMES)
def test_a_step_is_bitwise_gradient_accumulation_on_one_process(schedule, options, num_ranks):
    differences = {}
    for cell, num_microbatches in enumerate((1, 2, 3, 4, 8), start=num_ranks):
        for task in tasks_of(cell, num_microbatches):
            outcomes = on_ranks(num_ranks, run_with(task, schedule, num_microbatches, **options))
            differences[num_microbatches, task.loss.__name__] = difference(outcomes, task.reference(num_microbatches))

    assert {key: found for key, found in differences.items() if found} == {}


@pytest.mark.feature("B6")
def test_all_forwards_first_is_bitwise_gradient_accumulation_on_one_process():
    for task in tasks_of(0, 2):
        outcomes = on_ranks(2, run_with(task, "interleaved-1f1b", 2, all_forward_first=True))
        assert difference(outcomes, task.reference(2)) == []


def test_gradients_in_descending_order_are_equal_up_to_rounding():
    task = token_task(17, torch.float64)

    outcomes = on_ranks(3, run_with(task, "gpipe", 8, backward_order="descending"))

    assert difference(outcomes, task.reference(8), tolerance=1e-12) == []


@pytest.mark.feature("C7", "X6")
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 3, 2])
def test_a_step_on_gloo_is_bitwise_gradient_accumulation_on_one_process(request, num_ranks):
    ranks = request.getfixturevalue({4: "four_ranks", 3: "three_ranks", 2: "two_ranks"}[num_ranks])

    assert differences_on_gloo(ranks, cases_on_gloo) == [[]] * 12


def cases_on_gloo():
    grid = [(name, options, m) for name, options in IN_ORDER for m in (1, 3, 4)]
    return [(tasks_of(cell, m)[cell // 2 % 2], name, m, options) for cell, (name, options, m) in enumerate(grid)]


@pytest.mark.slow
def test_tied_weights_on_gloo_get_the_gradient_of_one_weight(four_ranks):
    task = token_task(9, torch.float64)
    layers = task.make_layers()
    layers[4].weight = layers[0].weight
    for _ in range(2):
        reference_step(layers, task.inputs, {}, task.target, loss=task.loss, num_microbatches=4, **task.options)

    first, *_, last = four_ranks.run(tied_steps_on_gloo, timeout_s=60.0)

    assert torch.equal(first["0.weight"], last["4.weight"])
    torch.testing.assert_close(first["0.weight"], layers[0].weight.grad, rtol=1e-12, atol=1e-12)


def tied_steps_on_gloo(rank):
    task = token_task(9, torch.float64)
    pipeline = Pipeline(task.make_layers(), "1f1b", 4, task.loss, tied=[("4.weight", "0.weight")], **task.options)
    for _ in range(2):
        step_task(pipeline, task)
    pipeline.close()
    return gradients_of(pipeline.named_parameters())


def run_with(task, schedule, num_microbatches, **options):
    return lambda wires: run_task(wires, task, schedule, num_microbatches, **options)


@pytest.mark.feature("B1")
def test_one_process_needs_neither_ranks_nor_transport():
    task = float_task(8)

    pipeline = Pipeline(task.make_layers(), microbatches=4, loss=task.loss)

    assert difference([step_task(pipeline, task)], task.reference(4)) == []
    pipeline.close()


@pytest.mark.feature("A1", "A14")
def test_outputs_are_merged_on_the_last_ranks_request_only():
    task = float_task(8)

    def case(pipeline):
        return [
            pipeline.step(*task.inputs, target=task.target, return_outputs=asked).outputs for asked in (True, False)
        ]

    first, (last, not_asked) = on_pipelines(2, task, case)

    assert first == [None, None]
    assert torch.equal(last, torch.cat(task.reference(4)[0].outputs))
    assert not last.requires_grad
    assert not_asked is None


@pytest.mark.feature("E6", "E12", "E16")
def test_two_steps_add_up_bit_for_bit_as_on_one_process_and_update_no_parameter():
    tasks = float_task(8), float_task(12), float_task(4)  # other batch sizes

    def case(pipeline):
        for task in tasks:
            step_task(pipeline, task)
        return gradients_of(pipeline.named_parameters())

    found = on_pipelines(3, tasks[0], case)

    layers = tasks[0].make_layers()
    for task in tasks:
        reference_step(layers, task.inputs, {}, task.target, loss=task.loss, num_microbatches=4)
    assert_gradients(found, layers)


def test_keywords_reach_every_layer_that_names_them_split_like_the_batch():
    task = float_task(6)
    task.make_layers = lambda: [Masked(0), block(1), Masked(2)]
    task.keywords = {"mask": torch.arange(6.0)[:, None], "scale": 0.5}

    found = on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), "1f1b", 3)

    assert difference(found, task.reference(3)) == []


# ---- what is left alone


class Noting(nn.Module):
    """Batch normalisation and dropout, with a count of calls."""

    def __init__(self, seed):
        super().__init__()
        self.inner = settle(nn.Linear(WIDTH, WIDTH), seed)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen_norm = nn.BatchNorm1d(WIDTH).eval()
        self.dropout = nn.Dropout(0.5)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return self.dropout(self.frozen_norm(self.norm(self.inner(x))))


def test_evaluate_between_steps_changes_nothing():
    task = float_task(8)
    layers = [Noting(0), Noting(1)]

    def state(pipeline):
        modules = [module for stage in pipeline.stages for layer in stage.layers.values() for module in layer.modules()]
        tensors = [t.clone() for module in modules for t in (*module.parameters(False), *module.buffers(False))]
        tensors += [g for g in gradients_of(pipeline.named_parameters()).values() if g is not None]
        return tensors, [module.training for module in modules]

    pipeline = Pipeline(layers, "1f1b", 4, task.loss)
    step_task(pipeline, task)
    tensors, modes = state(pipeline)
    random_state = torch.get_rng_state()
    pipeline.evaluate(*task.inputs, target=task.target)

    tensors_after, modes_after = state(pipeline)
    assert all(map(torch.equal, tensors, tensors_after))
    assert modes_after == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    step_task(pipeline, task)
    assert [layer.num_calls for layer in layers] == [12, 12]  # 4 microbatches x (step, evaluate, step)


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter that `train()` merges into the weight, as loralib's does."""

    def __init__(self, seed):
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.empty(2, WIDTH)), nn.Parameter(torch.empty(WIDTH, 2))
        self.is_merged = False
        settle(self, seed)

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged is mode:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x):
        hidden = super().forward(x)
        return hidden if self.is_merged else hidden + x @ self.down.T @ self.up.T


@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 1), ("1f1b", 2), ("zbv", 2), ("chimera", 2)])
def test_adapters_that_train_merges_into_their_weights_train_on_after_an_evaluation(schedule, num_ranks):
    task = float_task(8)

    def layers():
        return [Adapted(seed) for seed in range(4)]

    def case(wires):
        pipeline = Pipeline(layers(), schedule, 4, task.loss, transport=wires)
        evaluated = pipeline.evaluate(*task.inputs, target=task.target).loss
        loss = pipeline.step(*task.inputs, target=task.target).loss
        return evaluated, loss, pipeline.state_dict(), gradients_of(pipeline.named_parameters())

    plain = layers()
    nn.Sequential(*plain).eval()
    options = {"loss": task.loss, "num_microbatches": 4}
    merged = reference_evaluate(plain, task.inputs, {}, task.target, **options).loss
    nn.Sequential(*plain).train()
    expected = reference_step(plain, task.inputs, {}, task.target, **options).loss
    state, gradients = nn.ModuleList(plain).state_dict(), gradients_of(named(plain))

    for evaluated, loss, own, own_gradients in on_ranks(num_ranks, case):
        assert torch.equal(evaluated, merged)
        assert torch.equal(loss, expected)
        assert all(torch.equal(own[name], state[name]) for name in own)
        for name, gradient in own_gradients.items():
            wanted = gradients[name]
            assert gradient is wanted is None or torch.allclose(gradient, wanted)


@pytest.mark.feature("H6", "X40")
def test_evaluate_gives_the_losses_of_one_process_in_evaluation_mode():
    task = token_task(9)

    def case(pipeline):
        before = pipeline.evaluate(*task.inputs, target=task.target, return_outputs=True)
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        outcome = step_task(pipeline, task)
        return before, outcome, pipeline.evaluate(*task.inputs).loss

    before, outcomes, without_target = zip(*on_pipelines(3, task, case), strict=True)

    options = {"loss": task.loss, "num_microbatches": 4} | task.options
    expected = reference_evaluate(task.make_layers(), task.inputs, {}, task.target, **options)
    assert difference([Outcome(result, {}) for result in before], (expected, {})) == []
    assert [result.outputs is None for result in before] == [True, True, False]
    assert without_target == (None, None, None)
    assert difference(outcomes, task.reference(4)) == []


def test_modules_of_the_own_stages_are_used_in_place_and_the_others_never():
    task, layers = float_task(4), float_layers(num_layers=4)

    def case(wires):
        own = copy.deepcopy(layers)
        step_task(Pipeline(own, "gpipe", 2, task.loss, transport=wires), task)
        return [all(parameter.grad is not None for parameter in layer.parameters()) for layer in own]

    assert on_ranks(2, case) == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b"])
def test_a_step_leaves_no_tensor_alive(name):
    task = float_task(8)

    def num_tensors():
        gc.collect()
        return len(living_instances(torch.Tensor))

    pipeline = pipeline_of(None, task, name)
    for _ in range(2):  # gradients and agreements exist from the first step on
        pipeline.step(*task.inputs, target=task.target)
    before = num_tensors()
    pipeline.step(*task.inputs, target=task.target)
    pipeline.evaluate(*task.inputs, target=task.target)

    assert num_tensors() <= before  # those that other tests of this process have left may go meanwhile


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("schedule", "compile_layer"),
    [("gpipe", torch.jit.script), ("zb-h1", lambda layer: torch.jit.trace(layer, torch.ones(2, WIDTH)))],
)
def test_layers_that_torch_jit_has_compiled_train_like_others(schedule, compile_layer):
    batch = (values(1, 8, WIDTH),), values(2, 8, WIDTH)

    def layers():
        return [settle(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), seed) for seed in range(3)]

    of_ranks = [list(map(compile_layer, layers())) for _ in range(2)]  # not by two threads at a time
    task = Task(of_ranks.pop, *batch)
    reference = Task(layers, *batch).reference(4)

    assert difference(on_ranks(2, run_with(task, schedule, 4)), reference, tolerance=1e-5, loss_tolerance=1e-5) == []


@pytest.mark.parametrize(("schedule", "variable_shapes"), [("gpipe", True), ("zbv", False)])
def test_layers_may_be_frozen_and_unfrozen_between_steps(schedule, variable_shapes):
    task = float_task(4)
    all_gradients = task.reference(2)[1]

    def case(pipeline):
        for num_frozen in (2, 2, 0, 0, 3, 0):
            zero(pipeline)
            for name, parameter in pipeline.named_parameters():
                parameter.requires_grad_(int(name.partition(".")[0]) >= num_frozen)
            pipeline.evaluate(*task.inputs)
            for name, gradient in step_task(pipeline, task).gradients.items():
                is_frozen = int(name.partition(".")[0]) < num_frozen
                assert gradient is None if is_frozen else torch.equal(gradient, all_gradients[name])

    on_pipelines(2, task, case, schedule, 2, variable_shapes=variable_shapes)


def test_a_batch_that_comes_to_need_a_gradient_may_follow_one_that_does_not():
    """Nothing of the first stage can be trained, so that its outputs need what the batch needs."""
    task = Task(lambda: [nn.Tanh(), *float_layers(num_layers=3)], (values(1, 4, WIDTH),), values(2, 4, WIDTH))
    wanted = task.reference(2)[1]

    def case(pipeline):
        has_gradient = []
        for needs_gradient in (False, True, False):
            zero(pipeline)
            inputs = task.inputs[0].clone().requires_grad_(needs_gradient)
            pipeline.step(inputs, target=task.target)
            has_gradient.append(inputs.grad is not None)
            found = gradients_of(pipeline.named_parameters())
            assert all(torch.equal(found[name], wanted[name]) for name in found)
        return has_gradient

    assert on_pipelines(2, task, case, "gpipe", 2, split=(1, 3))[0] == [False, True, False]


# ---- what is measured


@pytest.mark.feature("H7")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_recorded_step_gives_every_rank_the_same_timeline_which_each_may_save_with_what_is_known_of_its_model(
    num_ranks, tmp_path
):
    task, path = float_task(8), tmp_path / "step.json"

    def case(pipeline):
        step_task(pipeline, task)
        assert pipeline.timeline is None
        step_task(pipeline, task, record=True)
        timeline, parts = pipeline.timeline, tuple(pipeline.layers_of_stage)
        timeline.save(path)
        messages = pipeline.recording.message_bytes
        return timeline, parts, messages, pipeline.profile(*task.inputs, target=task.target)

    found = on_pipelines(num_ranks, task, case)
    (first, parts, messages, _), *_ = found
    saved = Timeline.load(path)

    for timeline, *_, profile in found:
        assert timeline.source == "measured"
        assert timeline.to_json() == first.to_json() == saved.to_json()
        assert 0.0 <= timeline.bubble_fraction <= 1.0
        assert profile is not timeline
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]
    assert (saved.step, saved.layers_of_stage, saved.message_bytes) == (2, parts, messages)
    assert len(saved.layer_weights) == parts[-1].stop


# ---- hooks


@pytest.mark.feature("B13", "E4")
def test_hooks_run_in_a_training_step_only():
    calls = []
    task = float_task(4)
    options = {"reduce_stage": calls.append, "optimizer_step": lambda: calls.append("step")}
    pipeline = pipeline_of(None, task, build("gpipe", ranks=1, microbatches=2), 2, **options)

    step_task(pipeline, task)
    pipeline.evaluate(*task.inputs, target=task.target)

    assert calls == [0, "step"]


def test_reduce_stage_is_called_in_the_last_of_several_steps_alone_if_the_others_are_within_no_sync():
    task = float_task(4)

    def run(wires):
        calls = []
        pipeline = Pipeline(task.make_layers(), "1f1b", 2, task.loss, transport=wires, reduce_stage=calls.append)
        with pipeline.no_sync():
            step_task(pipeline, task)
            with pipeline.no_sync():
                step_task(pipeline, task)
            step_task(pipeline, task)
        assert calls == []
        step_task(pipeline, task)
        return calls

    assert on_ranks(2, run) == [[0], [1]]


def test_a_rank_alone_within_no_sync_and_no_sync_with_sums_of_tied_parameters_are_refused():
    task = float_task(4)

    def case(pipeline, ranks):
        with pipeline.no_sync() if pipeline.rank in ranks else nullcontext():
            error = error_of(step_task, pipeline, task)
        if len(ranks) == 2:
            step_task(pipeline, task)
        return error

    errors = on_pipelines(3, task, partial(case, ranks=[2]), "1f1b", 2)
    assert {error.rank for error in errors} == {2}
    text = "disagree on no_sync: rank 0 has none, rank 2 has no_sync(). Enter no_sync() on every rank"
    assert_errors(errors, StepRefused, text)

    options = {"reduce_stage": lambda stage: None, "tied": [("0.0.weight", "3.0.weight")]}
    errors = on_pipelines(2, task, partial(case, ranks=[0, 1]), "1f1b", 2, **options)
    text = "no_sync() does not go with reduce_stage and parameters that are tied over ranks"
    assert_errors(errors, PipelineError, text, "Average in every step")


@pytest.mark.feature("B22")
def test_fewer_microbatches_than_stages_are_warned_of_once_and_run():
    task = float_task(4, torch.float64)

    with pytest.warns(PenstockWarning, match="2 microbatches for 3 stages") as told:
        outcomes = on_ranks(3, run_with(task, "1f1b", 2))

    assert len(told) == 1
    assert difference(outcomes, task.reference(2)) == []


# ---- mistakes


def test_a_limit_in_bytes_is_proved_with_costs_per_layer_of_the_pipelines_own_split():
    """Five layers, of which rank 1 gets the heavier half unless the split says otherwise."""
    task = float_task(8)
    costs = LayerCosts(activation_bytes=[1, 1, 1, 1, 50], message_bytes=0)

    def made(wires, **options):
        pipeline_of(wires, task, costs=costs, **options).close()

    def refusal(wires, **options):
        return str(error_of(made, wires, **options))

    on_ranks(2, lambda wires: made(wires, memory_limit="52 bytes"))
    on_ranks(2, lambda wires: made(wires, memory_limit="51B", split=(3, 2)))
    assert "the limit of rank 1 is 51" in on_ranks(2, lambda wires: refusal(wires, memory_limit=51, split=(2, 3)))[0]
    assert "the limit of rank 0 is 1" in on_ranks(2, lambda wires: refusal(wires, memory_limit="1 activation"))[1]


@pytest.mark.feature("G1")
@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        ((8, 12), ["disagree on inputs: "]),
        ((7, 7), ["do not divide evenly"]),
        ((8, 7), ["do not divide evenly"]),
        ((None, None), ["rank 0", "no inputs"]),
    ],
    ids=["different", "ragged", "ragged on one", "none"],
)
def test_batches_that_do_not_fit_are_refused_everywhere_and_do_no_harm(rows, messages):
    bad = [float_task(number or 8) for number in rows]

    def wrong(pipeline):
        inputs = () if rows[0] is None else bad[pipeline.rank].inputs
        pipeline.step(*inputs, target=bad[pipeline.rank].target)

    assert_errors(errors_before_a_right_step(2, float_task(8), wrong), StepRefused, *messages)


@pytest.mark.feature("0.12")
@pytest.mark.parametrize("loss", [lambda output, target: (output - target) ** 2, lambda output, target: 1.0])
def test_a_loss_that_is_no_scalar_ends_the_step_on_every_rank_and_the_next_one_runs(loss):
    task = float_task(8)

    def case(wires):
        is_right = []
        own = lambda output, target: (square_loss if is_right else loss)(output, target)  # noqa: E731
        pipeline = Pipeline(task.make_layers(), "1f1b", 4, own, transport=wires, deadline_s=5.0)
        error = error_of(step_task, pipeline, task)
        is_right.append(True)
        zero(pipeline)
        return error, step_task(pipeline, task)

    errors, outcomes = zip(*on_ranks(2, case), strict=True)

    assert_errors(errors, PipelineError, "without dimensions")
    assert errors[1].rank == 1
    assert difference(outcomes, task.reference(4)) == []


class Shrinking(nn.Module):
    """Returns a width that the test chooses."""

    def __init__(self):
        super().__init__()
        self.width = WIDTH

    def forward(self, x):
        return x[:, : self.width] * 2.0


def shrunk(wires, **options):
    """Return what a step raises whose first stage has come to return less, unless it may, and the loss of the next."""
    layers = [Shrinking(), nn.Tanh()]
    inputs = values(1, 4, WIDTH)
    loss = lambda output, target: (output**2).mean()  # noqa: E731
    pipeline = Pipeline(layers, "gpipe", 2, loss, transport=wires, **options)
    pipeline.step(inputs)
    layers[0].width = WIDTH - 2
    error = None if options else error_of(pipeline.step, inputs)
    return error, pipeline.step(inputs).loss


@pytest.mark.feature("C12", "X33")
def test_a_stage_that_changes_its_shape_fails_on_the_sender_with_both_shapes_unless_shapes_may_vary():
    (sender, loss), (receiver, _) = on_ranks(2, shrunk)

    assert (sender.rank, sender.instruction) == (0, "0F0")
    assert all(part in str(sender) for part in ("0F0", "float32[2, 4]", "float32[2, 6]", "variable_shapes=True"))
    assert "rank 0" in str(receiver)
    assert receiver.rank == 0
    assert torch.isfinite(loss)

    losses = [loss for _, loss in on_ranks(2, partial(shrunk, variable_shapes=True))]
    expected = torch.stack([(part[:, :4] * 2.0).tanh().square().mean() for part in values(1, 4, WIDTH).split(2)])
    torch.testing.assert_close(losses[0], expected.mean())
    assert torch.equal(losses[0], losses[1])


@pytest.mark.feature("0.2")
@pytest.mark.parametrize(
    ("kind", "words", "arguments"),
    [
        (PartitionError, "only 5 layers", {"schedule": build("forward-only", ranks=1, microbatches=2, stages=6)}),
        (ConfigError, "has the option 'warmpu'. Did you mean 'warmup'", {"warmpu": "eager"}),
        (ConfigError, "reduction", {"reduction": "avg"}),
        (ConfigError, "below 1", {"microbatches": 0}),
    ],
)
def test_a_wrong_setting_is_one_clear_error(kind, words, arguments):
    error = error_of(Pipeline, float_layers(), **{"loss": square_loss} | arguments)

    assert type(error) is kind
    assert words in str(error)


@pytest.mark.feature("A10", "A11", "E16")
def test_a_step_without_a_loss_or_backwards_is_refused_and_an_evaluation_builds_no_graph():
    seen = []

    class Watching(nn.Module):
        def forward(self, x):
            seen.append(torch.is_grad_enabled())
            return x

    batch, layers = values(1, 4, WIDTH), [*float_layers(num_layers=1), Watching()]
    without_loss, forward_only = Pipeline(layers, microbatches=2), Pipeline(layers, "forward-only", 2, square_loss)

    assert "pass loss=" in str(error_of(without_loss.step, batch))
    error = error_of(forward_only.step, batch, target=values(2, 4, WIDTH))
    assert isinstance(error, ConfigError)
    assert "no backwards" in str(error)
    assert without_loss.evaluate(batch, return_outputs=True).outputs.shape == (4, WIDTH)
    Pipeline(layers, "gpipe", 2, square_loss).step(batch, target=values(2, 4, WIDTH))
    assert seen == [False, False, True, True]
    assert torch.is_grad_enabled()


@pytest.mark.feature("E16")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "zbv"}, "loss: a training step needs a loss; pass loss="),
        ({"schedule": "forward-only", "loss": square_loss}, "schedule: forward-only has no backwards to train with"),
    ],
    ids=["no loss", "no backwards"],
)
def test_what_cannot_train_refuses_a_step_on_every_rank_of_every_replica_and_then_evaluates(options, text):
    layers, batch = float_layers(), values(1, 8, WIDTH)

    def case(places):
        with Pipeline(float_layers(), microbatches=4, mesh=places, **options) as pipeline:
            error = error_of(pipeline.step, batch, target=values(2, 8, WIDTH))
            return error, pipeline.evaluate(batch, return_outputs=True).outputs

    ranks = on_mesh(2, 2, case)

    assert all(type(error) is ConfigError and str(error).startswith(text) for error, _ in ranks)
    outputs = [outputs for _, outputs in ranks if outputs is not None]
    assert len(outputs) == 2
    for found in outputs:  # a product of other numbers of rows may have other last bits
        torch.testing.assert_close(found, nn.Sequential(*layers)(batch))


def test_a_keyword_that_no_layer_of_any_rank_names_is_refused_everywhere():
    def misspell(wires):
        pipeline = Pipeline([Masked(0), Masked(1)], "1f1b", 2, square_loss, transport=wires)
        error = error_of(pipeline.step, values(1, 4, WIDTH), target=values(2, 4, WIDTH), maks=values(3, 4, 1))
        pipeline.close()
        return str(error)

    for message in on_ranks(2, misspell):
        assert "no layer's forward names 'maks'. Did you mean 'mask'?" in message
