"""Forwards that do more in one microbatch, mode or call than in another: no part skips what lies between two points."""

import copy

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from tests.support.local_pipelines import square_loss, values

ROWS, TARGET = values(1, 8, 3, 4, dtype=torch.float64), values(2, 8, 3, 4, dtype=torch.float64)
MASK = (torch.arange(24).reshape(8, 3, 1) % 3 != 0).double()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden, scale=1.0):
        return hidden + self.inner(hidden).tanh() * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, rows, mask=None):
        hidden = self.words(rows)
        for number, block in enumerate(self.blocks):
            hidden = self.call(block, number, hidden, mask)
        return self.head(hidden)


class Masked(Model):
    def call(self, block, number, hidden, mask):
        hidden = block(hidden)
        return hidden if mask is None else hidden * mask


class InPlace(Model):
    def call(self, block, number, hidden, mask):
        hidden = block(hidden)
        hidden[:, 0] = 0
        hidden += 1
        return hidden


class Moded(Model):
    def call(self, block, number, hidden, mask):
        return block(hidden, 0.5 if self.training else 1.0)


class Frozen(Model):
    def call(self, block, number, hidden, mask):
        with torch.set_grad_enabled(number > 1):
            return block(hidden)


class Cast(Model):
    def call(self, block, number, hidden, mask):
        with torch.autocast("cpu", torch.bfloat16, enabled=number != 1):
            return block(hidden)


class Scaled(Model):
    def call(self, block, number, hidden, mask):
        return block(hidden, mask * 2 if number > 1 else 1.0)


class Dropped(Model):
    def call(self, block, number, hidden, mask):
        return self.drop(block(hidden))


def model_of(kind):
    torch.manual_seed(0)
    return kind().double()


def pipeline_of(model, **options):
    return ps.Pipeline(cut(model, ["blocks.*"]), "1f1b", 4, square_loss, ranks=1, **options)


@pytest.mark.parametrize("kind", [Masked, InPlace, Moded, Frozen])
def test_steps_after_an_evaluation_without_a_mask_are_those_of_one_process(kind):
    model = model_of(kind)
    square_loss(model(ROWS, MASK), TARGET).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    pipeline = pipeline_of(model)
    pipeline.evaluate(rows=ROWS, target=TARGET)

    for _ in range(2):
        model.zero_grad()
        pipeline.step(rows=ROWS, mask=MASK, target=TARGET)
        for name, parameter in pipeline.named_parameters():
            if wanted[name] is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-12)


def test_a_block_runs_under_the_autocast_around_it():
    model = model_of(Cast).float()
    rows = ROWS.float()
    pipeline = pipeline_of(model)

    for _ in range(2):
        outputs = pipeline.evaluate(rows=rows, target=TARGET.float(), return_outputs=True).outputs
        assert torch.equal(outputs, model(rows).detach())


class Residual(Model):
    """The sum of the begin and of all blocks."""

    def forward(self, rows, mask=None):
        hidden = kept = self.words(rows)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + kept)


class AskedForItsType(Model):
    def call(self, block, number, hidden, mask):
        return block(hidden).to(hidden.dtype)


@pytest.mark.parametrize("kind", [Masked, Residual])
def test_a_model_runs_under_the_autocast_of_its_caller(kind):
    model = model_of(kind).float()
    pipeline = pipeline_of(model)

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            result = pipeline.evaluate(rows=ROWS.float(), target=TARGET.float(), return_outputs=True)
            assert torch.equal(result.outputs, model(ROWS.float()).detach())


def test_a_forward_that_asks_for_a_type_that_autocast_changes_is_refused():
    pipeline = pipeline_of(model_of(AskedForItsType).float())

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PenstockError, match="asks for its dtype"):
        pipeline.evaluate(rows=ROWS.float(), target=TARGET.float())


def test_a_batch_gets_its_gradient_through_what_is_made_of_it():
    model = model_of(Scaled)
    mask = MASK.clone().requires_grad_()
    square_loss(model(ROWS, mask), TARGET).backward()
    wanted, mask.grad = mask.grad, None
    pipeline = pipeline_of(model)

    for _ in range(2):
        mask.grad = None
        pipeline.step(rows=ROWS, mask=mask, target=TARGET)
        torch.testing.assert_close(mask.grad, wanted, rtol=1e-12, atol=1e-12)


def test_a_dropout_between_points_draws_after_an_evaluation_too():
    pipelines = [pipeline_of(model_of(Dropped), seed=3) for _ in range(2)]
    pipelines[0].evaluate(rows=ROWS, target=TARGET)

    losses = [[each.step(rows=ROWS, target=TARGET).loss for _ in range(2)] for each in pipelines]

    assert losses[0] == losses[1]


class Drawing(Block):
    def forward(self, hidden, scale=1.0):
        return hidden if self.training and torch.rand(()) < 0.5 else super().forward(hidden)


def test_what_stand_ins_draw_is_drawn_by_no_part():
    """A forward that runs again goes another way than the first one did: the short one."""
    model = model_of(Moded)
    model.blocks = nn.ModuleList(Drawing() for _ in range(4)).double()
    gradients = []
    for recompute in (False, True):
        pipeline = pipeline_of(copy.deepcopy(model), seed=3, recompute=recompute)
        pipeline.step(rows=ROWS, target=TARGET)
        gradients.append({name: parameter.grad for name, parameter in pipeline.named_parameters()})

    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-12, atol=1e-12)


def test_an_unsaved_buffer_that_counts_forwards_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.register_buffer("calls", torch.zeros(()), persistent=False)
            self.register_buffer("cache", torch.zeros(1), persistent=False)

        def forward(self, words):
            self.cache = torch.ones(words.shape[-1])  # made anew: what all stages have is equal
            self.calls += 1
            hidden = self.words(words) * self.calls
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    parts = cut(Counting(), ["blocks.*"])

    with pytest.raises(PenstockError, match=r"changes 'calls' for later forwards"):
        parts[0](words=torch.arange(5))
