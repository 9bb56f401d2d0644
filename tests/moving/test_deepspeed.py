"""Code written for DeepSpeed's pipelines trains as one process does, optimizer included."""

import re

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, EndOfData, PipelineError, StepRefused
from penstock.moving.deepspeed import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from tests.support.local_pipelines import VOCABULARY, WIDTH, error_of, on_ranks, token_loss, values


def logits(module, hidden):
    return hidden @ module.weight.t()


def model(**options):
    layers = [
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, dtype=torch.float64),
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
        torch.tanh,
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits, dtype=torch.float64),
    ]
    return PipelineModule(layers, loss_fn=token_loss, **options)


def data(num_items):
    generator = torch.Generator().manual_seed(6)
    return [tuple(torch.randint(VOCABULARY, (2, 3), generator=generator) for _ in range(2)) for _ in range(num_items)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def engine_of(**options):
    """An engine for batches of four microbatches."""
    return initialize(model(partition_method="uniform"), gradient_accumulation_steps=4, **options)


def on_engines(num_ranks, body, **options):
    """Return what `body(engine)` returned on every rank, each with an engine that is closed behind it."""

    def case(transport):
        engine = engine_of(transport=transport, **options)
        found = body(engine)
        engine.close()
        return found

    return on_ranks(num_ranks, case)


def train(rank, **options):
    engine = engine_of(optimizer=sgd, lr_scheduler=halving, **options)
    items = iter(data(8))
    losses = [engine.train_batch(items) for _ in range(2)]
    parameters = {name: parameter.detach().clone() for name, parameter in engine.pipeline.named_parameters()}
    found = losses, parameters, engine.grad_norm, engine.global_steps
    engine.close()
    return found


def one_process(clip=0.0):
    """Train the same layers with a plain loop."""
    layers = [spec() for spec in model().specs()]
    layers[4].module.weight = layers[0].weight
    named = {f"{index}.{name}": p for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    optimizer = sgd(list({id(p): p for p in named.values()}.values()))
    scheduler = halving(optimizer)
    items = iter(data(8))
    losses, norm = [], None
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(4):
            hidden, labels = next(items)
            for layer in layers:
                hidden = layer(hidden)
            loss = token_loss(hidden, labels) * 0.25
            loss.backward()
            total += loss.detach()
        if clip:
            norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, named, norm


def check(outcomes, expected, tolerance=1e-12):
    losses, parameters, _ = expected
    found = {name: value for _, own, *_ in outcomes for name, value in own.items()}
    assert found.keys() <= parameters.keys()
    assert {name for name in parameters if name not in found} <= {"4.module.weight"}
    for name, value in found.items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=tolerance, atol=tolerance, msg=name)
    for own_losses, *_ in outcomes:
        torch.testing.assert_close(torch.stack(own_losses), torch.stack(losses), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_ranks", "options"), [(1, {}), (3, {}), (2, {"schedule": "zb-h1", "split": [3, 2]})])
def test_batches_train_as_a_plain_loop_does(num_ranks, options):
    outcomes = on_ranks(num_ranks, lambda wires: train(wires.rank, transport=wires, **options))

    check(outcomes, one_process())
    assert [steps for *_, steps in outcomes] == [2] * num_ranks


def test_gradients_are_clipped_by_the_norm_over_all_ranks():
    outcomes = on_ranks(2, lambda wires: train(wires.rank, gradient_clipping=0.05, transport=wires))

    losses, parameters, norm = one_process(clip=0.05)
    check(outcomes, (losses, parameters, norm))
    for _, _, found, _ in outcomes:
        assert found == pytest.approx(float(norm), rel=1e-9)


def test_several_stages_a_rank_are_asked_for_by_num_stages():
    def case(transport):
        engine = initialize(
            model(num_stages=4, partition_method="uniform"),
            gradient_accumulation_steps=2,
            schedule="interleaved-1f1b",
            transport=transport,
        )
        stages = [stage.index for stage in engine.pipeline.stages]
        engine.close()
        return stages, engine.is_first_stage(), engine.is_last_stage()

    assert on_ranks(2, case) == [([0, 2], True, False), ([1, 3], False, True)]
    error = on_ranks(2, lambda wires: error_of(initialize, model(num_stages=3), transport=wires))[0]
    assert isinstance(error, ConfigError)
    assert "3 on 2 ranks" in str(error)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe"])
def test_a_family_that_leaves_no_choice_gets_its_stages_and_both_copies_train(schedule):
    def case(engine):
        ends = engine.is_first_stage(), engine.is_last_stage()
        engine.eval_batch(iter(data(4) * 2), num_micro_batches=8)
        engine.train_batch(iter(data(4)))
        found = {name: parameter.grad for name, parameter in engine.pipeline.named_parameters()}
        loss = engine.eval_batch(iter(data(4)))
        for parameter in engine.parameters():
            parameter.data -= 0.5 * parameter.grad
        moved = engine.eval_batch(iter(data(4)))
        evaluated = engine.eval_batch(iter(data(4) * 2), num_micro_batches=8)
        return ends, loss, (moved, evaluated), found

    first, last = on_engines(2, case, schedule=schedule)

    layers = [spec() for spec in model().specs()]
    layers[4].module.weight = layers[0].weight
    losses = []
    for hidden, labels in data(4):
        for layer in layers:
            hidden = layer(hidden)
        losses.append(token_loss(hidden, labels) / 4)
        losses[-1].backward()
    assert [first[0], last[0]] == [(True, True)] * 2 if schedule == "dualpipe" else [(True, True), (False, False)]
    for _, loss, evaluated, _ in (first, last):
        torch.testing.assert_close(loss, sum(losses).detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(*evaluated, rtol=1e-12, atol=0)  # both pipelines run the same modules
        assert evaluated[0] < loss
    wanted = {f"{index}.{name}": p.grad for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    for name, gradient in (first[3] | last[3]).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("method", "stages"),
    [("uniform", [3, 2]), ([1, 1, 1, 1, 4], [4, 1]), ([4, 1, 1, 1, 1], [1, 4])],
)
def test_the_partition_method_divides_the_layers(method, stages):
    def case(transport):
        engine = initialize(model(partition_method=method), transport=transport)
        engine.close()
        return [len(part) for part in engine.pipeline.layers_of_stage]

    assert on_ranks(2, case)[0] == stages


def test_ranks_between_the_ends_need_no_data():
    def case(engine):
        is_end = engine.is_first_stage() or engine.is_last_stage()
        return float(engine.train_batch(iter(data(4)) if is_end else None))

    assert len(set(on_engines(3, case))) == 1


@pytest.mark.feature("X31")
def test_evaluation_between_training_changes_nothing_and_gives_what_is_asked_for():
    def case(engine):
        evaluated = engine.eval_batch(iter(data(4)))
        losses = [engine.train_batch(iter(data(8)[:4]))]
        loss, outputs = engine.eval_batch(iter(data(4)), return_logits=True)
        only = engine.eval_batch(iter(data(4)), compute_loss=False)
        every = engine.eval_batch(iter(data(4)), reduce_output=None)
        losses.append(engine.train_batch(iter(data(8)[4:])))
        parameters = {name: parameter.detach() for name, parameter in engine.pipeline.named_parameters()}
        return (losses, parameters), evaluated, loss, outputs, only, every

    first, last = on_engines(2, case, optimizer=sgd, lr_scheduler=halving)

    expected = one_process()
    check([first[0], last[0]], expected)
    torch.testing.assert_close(first[1], expected[0][0], rtol=1e-12, atol=0)
    assert first[3] is first[4] is None
    assert last[3].shape == (8, 3, VOCABULARY)
    assert torch.equal(last[3], last[4])
    torch.testing.assert_close(token_loss(last[3], torch.cat([item[1] for item in data(4)])), last[2])
    torch.testing.assert_close(torch.stack(first[5]).mean(), first[2])


@pytest.mark.parametrize("options", [{"count": lambda labels: 6}, {}])
def test_data_that_end_early_end_the_batch_on_all_ranks_and_the_next_one_runs(options):
    def case(engine):
        error = error_of(engine.train_batch, iter(data(3)))
        empty = error_of(engine.train_batch, iter(()))
        return error, empty, train_two(engine), parameters_of(engine)

    outcomes = on_engines(2, case, optimizer=sgd, lr_scheduler=halving, **options)

    for error, empty, *_ in outcomes:
        assert type(error) is (EndOfData if options else PipelineError)
        assert re.search(r"the data of rank [01] ended: a batch takes 4 items, and 3 were left", str(error))
        assert type(empty) is EndOfData
        assert "and 0 were left" in str(empty)
    check([found for *_, losses, parameters in outcomes for found in [(losses, parameters)]], one_process())


def train_two(engine):
    items = iter(data(8))
    return [engine.train_batch(items) for _ in range(2)]


def parameters_of(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.pipeline.named_parameters()}


def broken_loader():
    yield from data(2)
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("given", "text", "options"),
    [
        (lambda: None, "was given nothing for data_iter; pass an iterator", {}),
        (lambda: data(4), "was given a list for data_iter; pass an iterator", {}),
        (lambda: iter([inputs for inputs, _ in data(4)]), "gave a Tensor; expected pairs (inputs, labels)", {}),
        (broken_loader, "data_iter of rank 1 raised OSError: disk gone", {"count": len}),
    ],
)
def test_data_that_are_none_refuse_the_batch_on_all_ranks(given, text, options):
    def case(engine):
        error = error_of(engine.train_batch, given() if engine.is_last_stage() else iter(data(4)))
        without_labels = engine.eval_batch(iter(data(4)) if engine.is_first_stage() else None, compute_loss=False)
        return error, without_labels

    outcomes = on_engines(2, case, **options)

    for error, _ in outcomes:
        assert type(error) is StepRefused
        assert text in str(error)
    assert outcomes[1][1].shape == (8, 3, VOCABULARY)


def test_what_deepspeed_takes_and_this_does_not_is_told():
    assert "loss_fn: is missing" in str(error_of(initialize(PipelineModule([nn.Identity()])).train_batch, iter(())))
    assert "loss_fn: is missing" in str(error_of(initialize(PipelineModule([nn.Identity()])).eval_batch, iter(())))
    assert "config: is not read; give gradient_accumulation_steps" in str(error_of(initialize, model(), config={}))
    assert "seed_layers: is not taken; leave it out" in str(error_of(model, seed_layers=True))
    assert "engine: is not taken; see docs/moving/deepspeed.md" in str(error_of(model, engine=None))
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    assert "optimizer: a SGD; give a function" in str(error_of(initialize, model(), optimizer=optimizer))


@pytest.mark.parametrize(
    ("make", "name", "instead"),
    [
        (lambda: model(), "parameters", "ask engine.parameters()"),
        (lambda: model(), "train", "see docs/moving/deepspeed.md"),
        (lambda: initialize(model()), "save_checkpoint", "ps.save_checkpoint(folder, engine.pipeline"),
        (lambda: initialize(model()), "backward", "train_batch runs forward, backward and the optimizer"),
        (lambda: initialize(model()), "zero_optimization", "(docs/moving/deepspeed.md)"),
    ],
)
def test_what_deepspeed_has_and_this_lacks_leads_on(make, name, instead):
    error = error_of(getattr, make(), name)

    assert isinstance(error, AttributeError)
    assert instead in str(error)


def test_tuples_are_one_argument_and_a_rank_of_functions_has_an_optimizer_too():
    def add(pair):
        return pair[0] + pair[1]

    items = [((values(1, 2, WIDTH), values(2, 2, WIDTH)), values(3, 2, WIDTH))]

    def case(transport):
        layers = PipelineModule(
            [add, LayerSpec(nn.Linear, WIDTH, WIDTH)], loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        engine = initialize(layers, optimizer=sgd, gradient_accumulation_steps=1, transport=transport)
        before = [parameter.clone() for parameter in engine.parameters()]
        engine.train_batch(iter(items))
        moved = [not torch.equal(*pair) for pair in zip(before, engine.parameters(), strict=True)]
        engine.close()
        return moved

    assert on_ranks(2, case) == [[], [True, True]]
