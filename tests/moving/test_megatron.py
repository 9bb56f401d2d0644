"""Forward steps written for Megatron-LM run unchanged, report what they report, and give one process's gradients."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import ConfigError, PipelineError, StepRefused
from penstock.ir.recompute import with_recompute
from penstock.moving.megatron import get_forward_backward_func
from penstock.moving.step_stage import RoutePlace
from penstock.schedules import build
from tests.moving.megatron_model import (
    Part,
    count_tokens,
    forward_step,
    forward_step_per_token,
    microbatches,
    one_process,
    squares,
)
from tests.moving.own_layers import assert_gradients, gradients
from tests.support.local_pipelines import assert_errors, error_of, on_ranks


def parts_of(rank, num_ranks, num_parts):
    num_stages = num_ranks * num_parts
    return {stage: Part(stage, num_stages) for stage in range(rank, num_stages, num_ranks)}


def data_of(stage, num_stages, num_microbatches):
    """First and last stage get data, as Megatron's loaders do; what lies between gets none."""
    return iter(microbatches(num_microbatches)) if stage in (0, num_stages - 1) else None


def train(rank, num_ranks, num_parts, num_microbatches, *, step=forward_step, **options):
    parts = parts_of(rank, num_ranks, num_parts)
    forward_backward_func = get_forward_backward_func(**options)
    reported = forward_backward_func(
        forward_step_func=step,
        data_iterator=[data_of(stage, num_ranks * num_parts, num_microbatches) for stage in parts],
        model=list(parts.values()),
        num_microbatches=num_microbatches,
        seq_length=3,
        micro_batch_size=2,
        forward_only=False,
    )
    loss = forward_backward_func.result.loss
    forward_backward_func.close()
    return reported, loss, gradients(parts)


def train_on(num_ranks, *sizes, **options):
    return on_ranks(num_ranks, lambda wires: train(wires.rank, num_ranks, *sizes, transport=wires, **options))


def refused(**options):
    """Return the errors with which two ranks refuse to train."""
    return on_ranks(2, lambda wires: error_of(train, wires.rank, 2, 1, 2, transport=wires, **options))


def run(call, part, items, step=forward_step, **more):
    """Call the function as a loop of Megatron-LM does for a batch of these microbatches."""
    given = {"model": part, "num_microbatches": len(items)} | more
    return call(forward_step_func=step, data_iterator=iter(items), **given)


def on_parts(body, **options):
    """Return what `body(call, part)` returned on both of two ranks, each with one part and a function to call."""

    def case(transport):
        call = get_forward_backward_func(transport=transport, **options)
        found = body(call, Part(transport.rank, 2))
        call.close()
        return found

    return on_ranks(2, case)


def mean_squares(output, item):
    return squares(output, item).mean()


def check(outcomes, num_stages, num_microbatches):
    items = microbatches(num_microbatches)
    losses, expected = one_process(num_stages, items, mean_squares, [1 / num_microbatches] * num_microbatches)
    assert_gradients([found for *_, found in outcomes], expected)
    assert [reported for reported, _, _ in outcomes[:-1]] == [[]] * (len(outcomes) - 1)
    assert [row["lm loss"] for row in outcomes[-1][0]] == losses
    assert [row["first"] for row in outcomes[-1][0]] == [item["features"][0, 0, 0] for item in items]
    assert not any(row["lm loss"].requires_grad for row in outcomes[-1][0])
    for _, loss, _ in outcomes:
        torch.testing.assert_close(loss, sum(losses) / num_microbatches, rtol=1e-12, atol=0)


@pytest.mark.feature("A12", "C9")
@pytest.mark.parametrize(("num_ranks", "num_parts", "num_microbatches"), [(1, 1, 4), (2, 1, 1), (2, 1, 4), (2, 2, 3)])
def test_a_forward_step_trains_as_one_process_does(num_ranks, num_parts, num_microbatches):
    outcomes = train_on(num_ranks, num_parts, num_microbatches)

    check(outcomes, num_ranks * num_parts, num_microbatches)


def test_three_values_without_a_count_weigh_microbatches_alike():
    outcomes = train_on(2, 1, 4, step=forward_step_per_token)

    def loss_of(output, item):
        return (squares(output, item) * item["mask"]).sum() / item["mask"].sum().to(torch.int64)

    assert_gradients([found for *_, found in outcomes], one_process(2, microbatches(4), loss_of, [0.25] * 4)[1])


def test_losses_summed_over_tokens_are_those_of_the_whole_batch_and_one_without_tokens_adds_nothing():
    items = microbatches(5)
    items[1]["mask"].zero_()

    def case(call, part):
        return run(call, part, items, forward_step_per_token), gradients({part.stage: part}), call.result.loss

    (_, first, loss), (reported, last, _) = on_parts(case, count_tokens=count_tokens)

    counts = [float(count_tokens(item)) for item in items]
    weights = [count / sum(counts) for count in counts]
    losses, expected = one_process(
        2, items, lambda o, i: (squares(o, i) * i["mask"]).sum() / max(float(i["mask"].sum()), 1.0), weights
    )
    assert_gradients([first, last], expected)
    assert len(set(counts)) > 2
    assert [float(row["lm loss"][1]) for row in reported] == counts
    whole = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)


def of_another_form(data_iterator, model):
    output, _ = forward_step(data_iterator, model)
    return output, lambda output: output.mean()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": forward_step_per_token, "count_tokens": lambda item: 1}, " tokens, but count_tokens counted 1"),
        ({"count_tokens": count_tokens}, "returned no number of tokens, but count_tokens counted"),
        ({"step": of_another_form}, "expected (loss, reported) or (sum, num_tokens, reported)"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_on_all_ranks(options, text):
    assert_errors(refused(**options), PipelineError, text)


@pytest.mark.feature("A14")
def test_collected_data_are_the_outputs_of_all_microbatches():
    def case(call, part):
        collected = run(call, part, microbatches(3), forward_only=True, collect_non_loss_data=True)
        return collected, call.result.loss, [parameter.grad for parameter in part.parameters()]

    first, last = on_parts(case)

    parts = [Part(0, 2), Part(1, 2)]
    for row, item in zip(last[0], microbatches(3), strict=True):
        parts[1].set_input_tensor([parts[0](item["features"])])
        assert torch.equal(row["logits"], parts[1](None))
    assert first[0] == []
    assert first[1] is last[1] is None
    assert not any(first[2] + last[2])


def test_forward_only_reports_losses_and_leaves_no_gradient_and_training_goes_on():
    def case(call, part):
        evaluated = run(call, part, microbatches(4), forward_only=True)
        grads = [parameter.grad for parameter in part.parameters()]
        trained = run(call, part, microbatches(4))
        assert part.input_tensor is None
        return evaluated, grads, trained, gradients({part.stage: part})

    first, last = on_parts(case)

    losses, expected = one_process(2, microbatches(4), mean_squares, [0.25] * 4)
    assert [row["lm loss"] for row in last[0]] == losses
    assert not any(first[1] + last[1])
    assert [row["lm loss"] for row in last[2]] == losses
    assert_gradients([first[3], last[3]], expected)


@pytest.mark.slow
def test_the_number_of_microbatches_may_change_from_call_to_call(two_ranks):
    assert two_ranks.run(ramp_up) == [[], [2, 4, 6, 2]]


def ramp_up(rank):
    part = Part(rank, 2)
    call = get_forward_backward_func()
    found = [len(run(call, part, microbatches(number))) for number in (2, 4, 6, 2)]
    call.close()
    return found if rank else []


@pytest.mark.feature("F7")
def test_a_forward_step_may_ask_for_its_place():
    def step(data_iterator, model, *, place):
        seen.append((place.stage, place.part, place.is_first, place.is_last))
        return forward_step(data_iterator, model)

    seen = []
    train_on(2, 2, 1, step=step)

    assert sorted(seen) == [(0, 0, True, False), (1, 0, False, False), (2, 1, False, False), (3, 1, False, True)]


@pytest.mark.feature("F8")
def test_every_part_has_a_data_iterator_of_its_own():
    def step(data_iterator, model, *, place):
        seen.setdefault(place.stage, []).append(next(data_iterator))
        return forward_step(iter(microbatches(1)), model)

    def case(transport):
        call = get_forward_backward_func(transport=transport)
        parts = parts_of(transport.rank, 2, 2)
        iterators = [iter([f"{stage}.{index}" for index in range(4)]) for stage in parts]
        call(forward_step_func=step, data_iterator=iterators, model=list(parts.values()), num_microbatches=4)

    seen = {}
    on_ranks(2, case)

    assert seen == {stage: [f"{stage}.{index}" for index in range(4)] for stage in range(4)}


class EncoderDecoder(Part):
    """Two stages encode, two decode: one tensor crosses into the decoder, and two within it."""

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor

    def run(self, place, item):
        if place.stage < 2:
            hidden = item["features"] if place.is_first else self.input_tensor[0]
            return torch.tanh(self.layer(hidden))
        decoded, memory = (item["labels"] * 0.5, *self.input_tensor) if place.stage == 2 else self.input_tensor
        decoded = torch.tanh(self.layer(decoded)) * memory
        return decoded if place.is_last else [decoded, memory]


def encode_and_decode(data_iterator, model, *, place):
    item = next(data_iterator)
    output = model.run(place, item)
    return output, lambda output: (mean_squares(output, item), {})


def train_encoder_and_decoder(rank, **options):
    parts = {stage: EncoderDecoder(stage, 4) for stage in (rank, rank + 2)}
    call = get_forward_backward_func(**options)
    iterators = [iter(microbatches(4)) for _ in parts]
    call(forward_step_func=encode_and_decode, data_iterator=iterators, model=list(parts.values()), num_microbatches=4)
    call.close()
    return gradients(parts)


def encoder_and_decoder_in_one_process():
    parts = [EncoderDecoder(stage, 4) for stage in range(4)]
    for item in microbatches(4):
        value = None
        for stage, part in enumerate(parts):
            part.set_input_tensor(value if isinstance(value, list) else [value])
            value = part.run(RoutePlace(stage, 4, 0), item)
        (mean_squares(value, item) / 4).backward()
    return gradients(dict(enumerate(parts)))


@pytest.mark.feature("C10", "F6")
def test_an_encoder_hands_its_memory_through_all_of_the_decoder():
    found = on_ranks(2, lambda wires: train_encoder_and_decoder(wires.rank, transport=wires))

    assert_gradients(found, encoder_and_decoder_in_one_process(), tolerance=1e-12)


@pytest.mark.feature("A15")
def test_the_schedule_follows_from_the_number_of_parts_unless_it_is_named():
    def case(transport):
        names = []
        for num_parts, schedule in ((1, None), (2, None), (2, "looped-bfs")):
            call = get_forward_backward_func(schedule, transport=transport)
            parts = parts_of(transport.rank, 2, num_parts)
            iterators = [iter(microbatches(2)) for _ in parts]
            assert call.pipeline is None
            models = list(parts.values())
            call(forward_step_func=forward_step, data_iterator=iterators, model=models, num_microbatches=2)
            names.append(call.pipeline.schedule.name)
        return names

    assert on_ranks(2, case)[0] == ["1f1b", "interleaved-1f1b", "looped-bfs"]


def test_data_that_end_early_stop_all_ranks_with_one_message_and_the_next_call_runs():
    def case(call, part):
        error = error_of(run, call, part, microbatches(2 if part.pre_process else 4), num_microbatches=4)
        part.zero_grad()
        run(call, part, microbatches(4))
        return error, gradients({part.stage: part})

    outcomes = on_parts(case)

    errors = [error for error, _ in outcomes]
    assert_errors(errors, PipelineError, "stage 0: the data ended at microbatch 2 of 4")
    expected = one_process(2, microbatches(4), mean_squares, [0.25] * 4)[1]
    assert_gradients([found for _, found in outcomes], expected)


def test_a_loss_scale_reaches_gradients_and_no_report():
    outcomes = train_on(2, 1, 4, scale_loss=1024.0)

    losses, expected = one_process(2, microbatches(4), mean_squares, [0.25] * 4)
    assert_gradients([found for *_, found in outcomes], {key: value * 1024 for key, value in expected.items()})
    assert [row["lm loss"] for row in outcomes[-1][0]] == losses


def of_length(items, length):
    return [{name: value[:, :length] for name, value in item.items()} for item in items]


@pytest.mark.parametrize("variable_shapes", [True, False])
def test_lengths_may_change_from_batch_to_batch_where_that_is_said(variable_shapes):
    def case(call, part):
        run(call, part, microbatches(4))
        part.zero_grad()
        if not variable_shapes:
            return error_of(run, call, part, shorter)
        run(call, part, shorter)
        return gradients({part.stage: part})

    shorter = of_length(microbatches(4), 2)
    found = on_parts(case, variable_shapes=variable_shapes)

    if variable_shapes:
        assert_gradients(found, one_process(2, shorter, mean_squares, [0.25] * 4)[1])
    else:
        assert "variable_shapes=True" in str(found[0])


class Optimizer:
    """What Megatron-LM's optimizers are to a training loop: they scale losses, and unscale gradients in their step."""

    def __init__(self, parameters, scale=2.0**16, num_dims=0):
        self._inner = torch.optim.SGD(parameters, lr=0.25)
        self._scale = torch.full((1,) * num_dims, scale, dtype=torch.float64)

    def scale_loss(self, loss):
        return self._scale * loss

    def zero_grad(self):
        self._inner.zero_grad()

    def step(self):
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self._scale.reshape(()))
        self._inner.step()


def train_step(forward_backward_func, data_iterator, model, optimizer, timers):
    """A step of a loop of 2022: everything by position, and the number of microbatches by nobody."""
    optimizer.zero_grad()
    losses_reduced = forward_backward_func(forward_step, data_iterator, model, optimizer, timers, False)
    optimizer.step()
    if not losses_reduced:
        return {}
    return {"lm loss": sum(row["lm loss"] for row in losses_reduced) / len(losses_reduced)}


@pytest.mark.feature("A12", "E2")
@pytest.mark.parametrize("num_dims", [0, 1])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_step_function_of_the_older_form_trains_as_one_process_does(num_parts, num_dims):
    def case(transport):
        call = get_forward_backward_func(transport=transport, num_microbatches=4)
        parts = parts_of(transport.rank, 2, num_parts)
        optimizer = Optimizer([p for part in parts.values() for p in part.parameters()], num_dims=num_dims)
        reports = []
        for step in range(2):
            items = microbatches(8)[4 * step :][:4]
            iterators = [iter(items) for _ in parts] if num_parts > 1 else iter(items)
            models = list(parts.values()) if num_parts > 1 else parts[transport.rank]
            reports.append(train_step(call, iterators, models, optimizer, None))
        evaluated = call(
            forward_step, iter(items) if num_parts == 1 else [iter(items), iter(items)], models, None, None, True
        )
        call.close()
        return (
            reports,
            len(evaluated),
            {(stage, n): p.data for stage, part in parts.items() for n, p in part.named_parameters()},
        )

    first, last = on_ranks(2, case)

    num_stages = 2 * num_parts
    whole = [Part(stage, num_stages) for stage in range(num_stages)]
    optimizer = torch.optim.SGD([p for part in whole for p in part.parameters()], lr=0.25)
    for step in range(2):
        optimizer.zero_grad()
        losses = []
        for item in microbatches(8)[4 * step :][:4]:
            hidden = item["features"]
            for part in whole:
                part.set_input_tensor([hidden])
                hidden = part(item["features"])
            losses.append(mean_squares(hidden, item))
        (sum(losses) / 4).backward()
        optimizer.step()
        torch.testing.assert_close(last[0][step]["lm loss"], sum(losses) / 4, rtol=1e-12, atol=0)
    expected = {(stage, n): p.data for stage, part in enumerate(whole) for n, p in part.named_parameters()}
    assert_gradients([first[2], last[2]], expected, tolerance=1e-12)
    assert first[0] == [{}, {}]
    assert (first[1], last[1]) == (0, 4)


def test_gradients_are_those_of_the_loss_that_the_optimizer_scales_in_this_call_alone():
    def case(call, part):
        reported = run(call, part, microbatches(4), optimizer=Optimizer(part.parameters()))
        scaled = gradients({part.stage: part})
        part.zero_grad()
        run(call, part, microbatches(4), optimizer=torch.optim.SGD(part.parameters()))
        return reported, scaled, gradients({part.stage: part})

    first, last = on_parts(case)

    losses, expected = one_process(2, microbatches(4), mean_squares, [0.25] * 4)
    assert_gradients([first[1], last[1]], {key: value * 2**16 for key, value in expected.items()})
    assert_gradients([first[2], last[2]], expected)
    assert [row["lm loss"] for row in last[0]] == losses


def test_a_number_in_the_call_goes_before_that_of_the_constructor_and_one_of_both_is_needed():
    def case(call, part):
        part_of_call = run(call, part, microbatches(2))
        of_constructor = call(forward_step, iter(microbatches(4)), part)
        return len(part_of_call), len(of_constructor)

    assert on_parts(case, num_microbatches=4) == [(0, 0), (2, 4)]
    errors = on_parts(lambda call, part: error_of(call, forward_step, iter(()), part))
    assert_errors(errors, ConfigError, "num_microbatches: is in neither the call nor get_forward_backward_func(...)")


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_number_that_one_rank_lacks_is_told_on_all(has_trained):
    def case(call, part):
        if has_trained:
            run(call, part, microbatches(4))
        number = 4 if part.pre_process else None
        return error_of(run, call, part, microbatches(4), num_microbatches=number)

    for error in on_parts(case):
        assert "num_microbatches: is in neither the call nor" in str(error)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"scale_loss": 2.0}, {"optimizer": Optimizer([torch.zeros(1)])}, "optimizer: has a scale_loss, and get_"),
        ({}, {"timers": 3}, "timers: 3 of type int; expected a function of a timer's name, or None"),
        (
            {},
            {"optimizer": SimpleNamespace(scale_loss=torch.amp.GradScaler("cpu").scale)},
            "which decides on each rank",
        ),
    ],
)
def test_what_would_scale_twice_or_time_nothing_is_refused_on_all_ranks(options, given, text):
    for error in on_parts(lambda call, part: error_of(run, call, part, microbatches(2), **given), **options):
        assert isinstance(error, ConfigError)
        assert text in str(error)


@pytest.mark.parametrize("has_groups", [[True, True], [False, True]])
def test_groups_of_other_pipelines_are_refused_on_all_ranks(has_groups):
    def case(call, part):
        groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4)) if has_groups[part.stage] else None
        error = error_of(run, call, part, microbatches(2), pg_collection=groups)
        right_groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 2))
        return error, len(run(call, part, microbatches(2), pg_collection=right_groups))

    outcomes = on_parts(case)

    text = (
        "pg_collection: its pp has 4 ranks, but this pipeline 2; give get_forward_backward_func(group=...) that group"
    )
    assert_errors([error for error, _ in outcomes], StepRefused, text)
    assert [number for _, number in outcomes] == [0, 2]


def test_arguments_that_do_not_fit_are_refused():
    def call(**given):
        usual = {"forward_step_func": forward_step, "data_iterator": None, "model": Part(0, 1), "num_microbatches": 2}
        schedule = given.pop("schedule", None)
        return str(error_of(get_forward_backward_func(schedule), **{**usual, **given}))

    assert "Did you mean 'seq_length' or" in call(seq_lenght=3)
    assert "forward_only=True" in call(data_iterator=iter(microbatches(2)), collect_non_loss_data=True)
    assert "a list of 2 for 1 model parts; give one iterator per part" in call(data_iterator=[None, None])
    assert "one for 2 model parts" in call(model=[Part(0, 2), Part(1, 2)], data_iterator=iter(()))
    assert "places the stages [0] on rank 0; bring one part for each" in call(
        model=[Part(0, 2), Part(1, 2)], schedule=build("1f1b", ranks=1, microbatches=2)
    )
    assert "takes the microbatches in the order [1, 0]" in call(
        schedule=build(lambda ranks, microbatches: [["0F1", "0F0", "0B1", "0B0"]], ranks=1, microbatches=2)
    )


@pytest.mark.parametrize("has_trained", [False, True])
def test_arguments_that_do_not_fit_on_one_rank_are_told_on_all(has_trained):
    def case(call, part):
        if has_trained:
            run(call, part, microbatches(4))
        iterators = iter(microbatches(4)) if part.pre_process else [None, None]
        given = {"forward_step_func": forward_step, "model": part, "num_microbatches": 4}
        return error_of(call, data_iterator=iterators, **given)

    for error in on_parts(case):
        assert type(error) is (StepRefused if has_trained else ConfigError)
        assert "data_iterator: a list of 2 for 1 model parts" in str(error)


@pytest.mark.parametrize(
    "options",
    [{"schedule": build("seq1f1b", ranks=1, microbatches=2, slices=2)}, {"schedule": "seq1f1b", "slices": 2}],
)
def test_slices_are_refused_before_anything_is_called(options):
    error = error_of(get_forward_backward_func, **options)

    assert isinstance(error, ConfigError)
    assert "a forward step takes whole ones off its data iterator; use a schedule without slices" in str(error)


@pytest.mark.parametrize("schedule", ["1f1b", with_recompute(build("1f1b", ranks=2, microbatches=2))])
def test_forwards_that_run_again_are_refused_since_their_data_are_gone(schedule):
    options = {"recompute": True} if schedule == "1f1b" else {}

    for error in refused(schedule=schedule, **options):
        assert isinstance(error, ConfigError)
        assert "runs forwards again (R), but a forward step has taken its item off the data iterator" in str(error)


def train_two_routes(rank, num_microbatches, **options):
    """Two parts a rank, one for each direction; each has its own route's half of the batch."""
    items, half = microbatches(num_microbatches), num_microbatches // 2
    parts = [Part(rank, 2), Part(1 - rank, 2)]
    call = get_forward_backward_func("dualpipe", **options)
    places = []

    def step(data_iterator, model, *, place):
        places.append((place.stage, place.num_stages, place.is_first, place.is_last))
        return forward_step(data_iterator, model)

    given = {"data_iterator": [iter(items[:half]), iter(items[half:])], "model": parts}
    reported = call(forward_step_func=step, num_microbatches=num_microbatches, **given)
    loss = call.result.loss
    call.close()
    return reported, loss, gradients({rank: parts[0], 1 - rank: parts[1]}), set(places)


def test_a_part_for_each_direction_runs_the_same_step():
    outcomes = on_ranks(2, lambda wires: train_two_routes(wires.rank, 4, transport=wires))

    losses, expected = one_process(2, microbatches(4), mean_squares, [0.25] * 4)
    for reported, loss, found, places in outcomes:
        assert_gradients([found], expected, tolerance=1e-12)
        torch.testing.assert_close(loss, sum(losses) / 4, rtol=1e-12, atol=0)
        assert places == {(0, 2, True, False), (1, 2, False, True)}
        assert len(reported) == 2
    assert [row["lm loss"] for row in outcomes[1][0] + outcomes[0][0]] == losses


def test_tokens_cannot_be_counted_over_two_routes():
    errors = on_ranks(
        2, lambda wires: error_of(train_two_routes, wires.rank, 4, count_tokens=count_tokens, transport=wires)
    )

    assert_errors(errors, ConfigError, "count_tokens: dualpipe has two routes")


def test_ties_name_parameters_by_stage_and_model():
    def case(call, part):
        run(call, part, microbatches(2))
        return part.layer.weight.grad

    first, last = on_parts(case, tied=[("0.model.layer.weight", "1.model.layer.weight")])

    assert torch.equal(first, last)
