"""A whole model and lists of names are pipelined as torchtitan does it, with one process's gradients."""

import pytest
import torch

from penstock.errors import ConfigError, PipelineError
from penstock.moving.torchtitan import generate_llm_fqn_per_model_part, pipeline_llm
from penstock.schedules import build
from tests.moving.test_model_parts import Model
from tests.support.local_pipelines import assert_errors, error_of, on_ranks, settle, token_loss
from tests.support.reference import reference_step

NAMES = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["norm", "output"]]


def whole_model(is_tied=False):
    model = settle(Model().to(torch.float64), 7)
    if is_tied:
        model.output.weight = model.tok_embeddings.weight
    return model


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(5, (8, 3), generator=generator), torch.randint(5, (8, 3), generator=generator)


def train(rank, schedule, names=NAMES, is_tied=False, model=None, **options):
    model = model or whole_model(is_tied)
    pipelined = pipeline_llm(model, names, schedule, 4, token_loss, **options)
    tokens, labels = batch()
    targets, losses = (labels, []) if pipelined.pp_has_last_stage else (None, None)
    if pipelined.pp_has_first_stage:
        pipelined.pp_schedule.step(tokens, target=targets, losses=losses)
    else:
        pipelined.pp_schedule.step(target=targets, losses=losses)
    pipelined.pp_schedule.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    found = {name: p.grad for part in pipelined.model_parts for name, p in part.named_parameters()}
    return losses, found


def reference(is_tied=False):
    model = whole_model(is_tied)
    tokens, labels = batch()
    result = reference_step([model], (tokens,), {}, labels, loss=token_loss, num_microbatches=4)
    return result, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def check(outcomes, is_tied=False, tolerance=0.0):
    expected, expected_gradients = reference(is_tied)
    found = {name: gradient for _, own in outcomes for name, gradient in own.items()}
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
    assert [losses for losses, _ in outcomes if losses is not None] == [expected.losses]


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        ("1F1B", [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]),
        ("Interleaved1F1B", NAMES),
        ("ZBVZeroBubble", NAMES),
    ],
)
def test_parts_train_as_the_whole_model_does(schedule, names):
    outcomes = on_ranks(2, lambda wires: train(wires.rank, schedule, names, transport=wires))

    check(outcomes, tolerance=0.0 if schedule != "ZBVZeroBubble" else 1e-12)


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_part_is_on_two_ranks_under_a_schedule_of_two_routes(is_tied):
    names = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]

    outcomes = on_ranks(2, lambda wires: train(wires.rank, "dualpipe", names, is_tied, transport=wires))

    for outcome in outcomes:
        check([outcome], is_tied, tolerance=1e-12)  # each rank has the whole model


def test_a_csv_file_is_the_schedule_and_tells_which_parts_are_whose(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(build("zbv", ranks=2, microbatches=4).to_csv())

    outcomes = on_ranks(2, lambda wires: train(wires.rank, str(path), transport=wires))

    check(outcomes, tolerance=1e-12)
    assert [losses is None for losses, _ in outcomes] == [False, True]


def test_an_output_tied_to_the_embedding_stays_tied_over_ranks():
    outcomes = on_ranks(2, lambda wires: train(wires.rank, "Interleaved1F1B", is_tied=True, transport=wires))

    check(outcomes, is_tied=True, tolerance=1e-12)
    assert torch.equal(outcomes[0][1]["tok_embeddings.weight"], outcomes[1][1]["output.weight"])


def test_every_part_is_prepared_before_it_is_used():
    def prepare(part):
        part.to_empty(device="cpu")
        values_of = whole_model().state_dict()
        part.load_state_dict({name: values_of[name] for name in part.state_dict()})

    def case(transport):
        with torch.device("meta"):
            model = Model().to(torch.float64)
        options = {"prepare": prepare, "device": "cpu", "transport": transport}
        return train(transport.rank, "Interleaved1F1B", model=model, **options)

    check(on_ranks(2, case))


def test_parts_that_do_not_divide_over_the_ranks_are_told_so():
    names = [["tok_embeddings"], ["layers"], ["norm", "output"]]

    errors = on_ranks(2, lambda wires: error_of(train, wires.rank, "1F1B", names, transport=wires))

    assert_errors(errors, ConfigError, "3 parts of the model do not divide over 2 ranks; give a multiple")


def test_ranks_with_other_names_hear_of_it():
    names = [NAMES, [[*NAMES[0], "layers.1"], NAMES[2], ["norm"], ["output"]]]

    errors = on_ranks(2, lambda wires: error_of(train, wires.rank, "zbv", names[wires.rank], transport=wires))

    told = "the ranks disagree on module_fqns_per_model_part: rank 0 has [['tok_embeddings', 'layers.0'],"
    assert_errors(errors, PipelineError, told)


def test_what_is_pipelined_unpacks_as_torchtitans_does():
    pp_schedule, model_parts, has_first, has_last = pipeline_llm(
        whole_model(), [["tok_embeddings", "layers", "norm", "output"]], "1F1B", 4, token_loss
    )

    assert [name for name, _ in model_parts[0].named_parameters()] == list(reference()[1])
    assert has_first
    assert has_last
    pp_schedule.close()


def test_names_are_generated_for_even_parts():
    assert generate_llm_fqn_per_model_part(4, 6) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "norm", "output"],
    ]
    assert [len(part) for part in generate_llm_fqn_per_model_part(2, 4, input_weight=3)] == [2, 5]
    assert list(map(len, generate_llm_fqn_per_model_part(3, 32))) == [
        12,
        12,
        11,
    ]  # torchtitan once divided by zero here
