"""`verify` finds faults that are planted in parts, with their module, and leaves the model as it was."""

import copy
import random

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.models.cutting.part import CutPart
from penstock.verifying import parts as verifying_parts
from penstock.verifying.observation import BUFFER, EVALUATION, GRADIENT, LOSS, OUTPUT, PARAMETER, TRAINING
from penstock.verifying.verify import DROPOUT_OFF, FAILED, NO_TRAINING, SAME_DROPOUT, verify
from tests.support.verified_forms import FORM_CASES
from tests.support.verified_models import BLOCKS, CASES, WORDS, Block, Plain
from tests.support.verified_values import VALUE_CASES

RIGHT = ["plain", "masked", "scaled", "dropping", "named", "tied", "counting", "branching", "declared_skips"]


@pytest.fixture
def plant(monkeypatch):
    """Change what the part of a layer returns."""

    def set_fault(name, change):
        forward = CutPart.forward

        def changed(self, *inputs, **keywords):
            output = forward(self, *inputs, **keywords)
            return change(self, output) if self.layer_name == name else output

        monkeypatch.setattr(CutPart, "forward", changed)

    return set_fault


def verify_case(name, **options):
    case = CASES[name]
    return verify(case.model(), case.points, *case.batches(), **options)


def first(report, kind):
    return next(difference for difference in report.differences if difference.kind == kind)


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_cut_gets_right_is_right(name):
    report = verify_case(name)

    assert report.is_right, str(report)
    assert {row.kind for row in report.comparisons if row.mode == TRAINING} == {OUTPUT, LOSS, GRADIENT, BUFFER}
    assert report.largest_error < 1e-14
    report.raise_if_wrong()


@pytest.mark.slow
@pytest.mark.parametrize("case", (FORWARDS := VALUE_CASES | FORM_CASES).values(), ids=FORWARDS)
def test_what_a_forward_does_around_its_blocks_is_right_or_refused_by_name(case):
    report = verify(case.model(), case.points, *case.batches())

    is_refused = report.refusal and not report.refusal.startswith(FAILED)
    assert is_refused if case.may_be_refused else report.is_right, str(report)


@pytest.mark.parametrize("options", [{"ranks": 1}, {"ranks": 3}, {"schedule": "zbv"}, {"microbatches": 4}])
def test_other_ranks_schedules_and_microbatches(options):
    assert verify_case("counting", **options).is_right


def test_a_loss_of_the_caller_is_trained():
    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    case = CASES["plain"]
    batches = [{**batch, "target": batch["tokens"]} for batch in case.batches()]

    assert verify(case.model(), case.points, *batches, loss=loss).is_right
    parts = [ps.Part(batch["tokens"], target=batch["target"]) for batch in batches]
    assert verify(case.model(), case.points, *parts, loss=loss).is_right


def test_a_list_of_modules_is_compared_by_the_names_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    assert verify(model, list(model), torch.randn(4, 4), torch.randn(4, 4)).is_right


def test_layers_cut_by_the_caller_share_the_model_and_leave_it_alone():
    case = CASES["counting"]
    model = case.model()
    state = copy.deepcopy(model.state_dict())

    assert verify(model, ps.cut(model, case.points), *case.batches()).is_right
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# ---- planted faults


def test_a_scaled_output_is_found_at_the_module_that_gets_it(plant):
    plant("blocks.1", lambda part, output: output * 1.001)

    report = verify_case("plain")

    assert not report.is_right
    difference = report.differences[0]
    assert (difference.kind, difference.mode, difference.batch) == (OUTPUT, EVALUATION, 0)
    assert difference.module.startswith("blocks.2")
    assert 1e-6 < difference.error < 1e-2


def test_a_wrong_output_of_the_last_part_is_of_the_models_own_forward(plant):
    plant("head", lambda part, output: output + 1)

    report = verify_case("plain")

    assert report.differences[0].module == ""
    assert "the model's own forward" in str(report)


def test_a_dropped_gradient_is_found_where_the_backward_meets_it(plant):
    plant("blocks.1", lambda part, output: output.detach())

    report = verify_case("plain")

    assert {difference.kind for difference in report.differences} == {GRADIENT}
    assert report.differences[0].module.startswith("blocks.1")
    assert report.differences[0].problem == "is missing"
    assert "blocks.1" in str(report).splitlines()[-1]


def test_a_halved_gradient_is_found(plant):
    def halve(part, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 2)
        return output

    plant("blocks.2", halve)

    report = verify_case("plain")

    assert {difference.kind for difference in report.differences} == {GRADIENT}
    assert report.differences[0].module.startswith("blocks.2")


def test_a_buffer_that_is_left_alone_is_found(plant):
    def put_back(part, output):
        norm = part.get_submodule("blocks.1").batch_norm
        norm.running_mean = torch.zeros_like(norm.running_mean)
        return output

    plant("blocks.1", put_back)

    difference = first(verify_case("counting"), BUFFER)

    assert (difference.name, difference.module) == ("blocks.1.batch_norm.running_mean", "blocks.1.batch_norm")


def test_a_fault_of_evaluation_alone_and_one_of_the_second_batch(plant):
    plant("blocks.1", lambda part, output: output if part.training else output * 2)

    assert {difference.mode for difference in verify_case("plain").differences} == {EVALUATION}


def test_a_stale_copy_of_a_parameter_shows_in_the_second_batch(plant):
    weights = {}

    def stale(part, output):
        weight = part.get_submodule("blocks.1").linear.weight
        first = weights.setdefault(id(weight), weight.detach().clone())
        return output * (1 + weight.detach() - first).prod()

    plant("blocks.1", stale)

    assert {difference.batch for difference in verify_case("plain").differences} == {1}


def test_other_first_values_are_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    difference = verify(model, list(other), torch.randn(4, 4)).differences[0]

    assert (difference.kind, difference.name) == (PARAMETER, "0.weight")


def test_a_parameter_that_no_layer_holds_is_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    report = verify(model, [nn.Sequential(model[0])], torch.randn(4, 4))

    assert first(report, PARAMETER).problem == "no rank has the parameter"


def test_what_a_pipeline_refuses_is_in_the_report():
    report = verify_case("plain", ranks=20)

    assert report.refusal.startswith("20 ranks") or "layers" in report.refusal
    assert not report.is_right
    with pytest.raises(ps.PenstockError, match="refused"):
        report.raise_if_wrong()


def test_what_fails_in_the_parts_alone_is_in_the_report(plant):
    def fail(part, output):
        raise KeyError("lost")

    plant("blocks.1", fail)

    refusal = verify_case("plain").refusal

    assert refusal.startswith("the parts fail, and the model does not: ")
    assert refusal.endswith("KeyError: 'lost'")


# ---- random numbers, and the state of the caller


class Noisy(Plain):
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        if self.training:
            hidden = hidden + torch.randn_like(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class AlwaysNoisy(Noisy):
    def forward(self, tokens):
        return super().forward(tokens) + torch.rand(())


def test_dropout_drops_the_same_places_where_a_model_draws():
    report = verify_case("dropping")

    assert report.is_right
    assert report.notes == (SAME_DROPOUT,)


class DropPath(Plain):
    def __init__(self):
        super().__init__()
        self.drop_path, self.dropout = 0.5, nn.Dropout(0.2)

    def forward(self, tokens):
        hidden = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            is_kept = torch.rand(len(tokens), 1, 1) >= (self.drop_path if self.training else 0)
            hidden = hidden + block(hidden) * is_kept
        return self.head(self.norm(hidden))


def test_dropout_is_off_where_a_model_draws_besides_and_comes_back():
    model = DropPath().double()

    report = verify(model, BLOCKS, *CASES["plain"].batches())

    assert report.is_right, str(report)
    assert report.notes == (DROPOUT_OFF,)
    assert (model.drop_path, model.dropout.p) == (0.5, 0.2)


def test_a_model_with_other_draws_is_compared_in_evaluation_alone():
    report = verify(Noisy().double(), BLOCKS, *CASES["plain"].batches())

    assert report.is_right
    assert report.notes == (NO_TRAINING,)
    assert TRAINING not in {row.mode for row in report.comparisons}


def test_draws_in_evaluation_are_refused():
    with pytest.raises(ConfigError, match="evaluation draws"):
        verify(AlwaysNoisy().double(), BLOCKS, *CASES["plain"].batches())


@pytest.mark.parametrize("is_training", [True, False])
def test_the_model_and_the_generators_are_as_they_were(is_training):
    case = CASES["counting"]
    model = case.model().train(is_training)
    model.blocks[0].eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    generators = torch.get_rng_state(), random.getstate()

    report = verify(model, case.points, *case.batches())

    assert report.is_right, str(report)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embedding.weight.grad is None
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]


def test_it_runs_where_gradients_are_off():
    with torch.no_grad():
        assert verify_case("plain").is_right


# ---- wrong arguments


def meta_model():
    with torch.device("meta"):
        return Plain()


class Uncopied(Plain):
    def __deepcopy__(self, memo):
        raise TypeError("no copy")


class OnTwoDevices(nn.Module):
    def named_parameters(self, *args, **kwargs):
        return iter([("a", torch.ones(1)), ("b", _Away(torch.ones(1)))])


class _Away(torch.Tensor):
    device = torch.device("cuda", 0)


TOKENS = torch.zeros(4, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "points", "batches", "message"),
    [
        (Plain, BLOCKS, [], "batches: there is none"),
        (Plain, BLOCKS, [3], "batch 0 is 3 of type int"),
        (Plain, BLOCKS, [TOKENS.to("meta")], "batch 0 has a tensor on meta"),
        (Plain, ["layers.*"], [TOKENS], "names no submodule"),
        (Plain, [], [TOKENS], "expected the points"),
        (Plain, None, [TOKENS], "expected the points"),
        (Plain, "blocks.*", [TOKENS], "expected a list of names"),
        (meta_model, BLOCKS, [TOKENS], "is on the meta device"),
        (Uncopied, BLOCKS, [TOKENS], "cannot be copied"),
        (OnTwoDevices, BLOCKS, [TOKENS], "move the model to one device"),
        (lambda: 5, BLOCKS, [TOKENS], "expected an nn.Module"),
    ],
)
def test_wrong_arguments_are_refused(make, points, batches, message):
    with pytest.raises(ConfigError, match=message):
        verify(make(), points, *batches)


def test_a_loss_needs_targets():
    with pytest.raises(ConfigError, match="batch 0 has no target"):
        verify(Plain(), BLOCKS, TOKENS, loss=nn.functional.mse_loss)


def test_one_batch_is_run_twice_and_the_report_says_so():
    assert "note: the one batch is run twice" in str(verify(Plain(), BLOCKS, TOKENS))


def test_lower_precisions_have_wider_tolerances():
    assert [verify(Plain().to(dtype), BLOCKS, TOKENS).tolerance for dtype in (torch.float64, torch.float32)] == [
        1e-12,
        1e-5,
    ]
    assert verify(Plain(), BLOCKS, TOKENS, tolerance=0.5).tolerance == 0.5


def test_an_error_of_the_model_itself_is_raised():
    with pytest.raises(IndexError):
        verify(Plain(), BLOCKS, TOKENS + WORDS)


def test_a_pipeline_is_made_for_every_rank(monkeypatch):
    ranks = []
    observe = verifying_parts.PartsRun._observe

    def noted(self, pipeline, *rest):
        ranks.append(pipeline.rank)
        return observe(self, pipeline, *rest)

    monkeypatch.setattr(verifying_parts.PartsRun, "_observe", noted)

    verify_case("plain")

    assert sorted(ranks) == [0, 1]
    assert isinstance(Plain().blocks[0], Block)
