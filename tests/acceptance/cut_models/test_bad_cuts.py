"""Cuts that cannot be right: points that do not exist or nest, blocks called twice or left out, no blocks at all."""

import pytest
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from tests.support.cut_cases import Chain, assert_refused, assert_right, assert_right_or_refused, batch

on_both = pytest.mark.parametrize("num_ranks", [1, 2])


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (["layers.*"], r"layers"),
        (["blocks.9"], r"blocks\.9"),
        (["block.*"], r"blocks?"),
        (["blocks.*.none"], r"none"),
        (["blocks.*", "blocks.0.inner"], r"blocks\.0"),
        (["blocks", "blocks.*"], r"blocks"),
        ([], r"points"),
        ("blocks.*", r"points"),
        (["blocks.*", "blocks.*"], r"blocks"),
    ],
)
def test_points_that_do_not_exist_nest_or_stand_twice_are_refused(points, text):
    with pytest.raises(ConfigError, match=text):
        ps.cut(Chain(), points)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(), nn.Identity()])
def test_a_model_without_blocks_is_refused(model):
    with pytest.raises(ConfigError, match=r"points|blocks"):
        ps.cut(model, ["blocks.*"])


class Twice(Chain):
    """One block runs twice."""

    def call(self, block, number, hidden):
        hidden = block(hidden)
        return block(hidden) if number == 2 else hidden


class Loop(Chain):
    """All blocks run twice, as in a recurrent model of shared layers."""

    def forward(self, rows):
        hidden = self.begin(rows)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden)
        return self.head(hidden)


class LaterAgain(Chain):
    def call(self, block, number, hidden):
        hidden = block(hidden)
        return self.blocks[0](hidden) if number == 3 else hidden


class TwoNames(Chain):
    """One block under two names."""

    def build(self):
        self.blocks[2] = self.blocks[1]


@on_both
@pytest.mark.parametrize(("kind", "name"), [(Twice, r"blocks\.2"), (Loop, r"blocks\.0"), (LaterAgain, r"blocks\.0")])
def test_a_block_that_is_called_twice_is_named(kind, name, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=rf"(?s)^(?=.*{name})(?=.*(twice|again|2 times|once))")


@on_both
def test_a_block_under_two_names_is_right_or_named(num_ranks):
    assert_right_or_refused(TwoNames, num_ranks=num_ranks, match=r"blocks\.[12]")


class LeftOut(Chain):
    def call(self, block, number, hidden):
        return hidden if number == 2 else block(hidden)


class LeftOutLater(Chain):
    """By a flag, as layer drop in some steps."""

    def forward(self, rows, flag=False):
        hidden = self.begin(rows)
        for number, block in enumerate(self.blocks):
            hidden = hidden if flag and number == 1 else block(hidden)
        return self.head(hidden)


class LastLeftOut(Chain):
    def call(self, block, number, hidden):
        return hidden if number == 3 else block(hidden)


@on_both
@pytest.mark.parametrize(("kind", "name"), [(LeftOut, r"blocks\.2"), (LastLeftOut, r"blocks\.3")])
def test_a_block_that_is_left_out_is_named(kind, name, num_ranks):
    assert_refused(
        kind, num_ranks=num_ranks, match=rf"(?s)^(?=.*{name})(?=.*(left out|leaves out|never|not call|skip))"
    )


@on_both
def test_a_block_that_is_left_out_in_a_later_step_is_named_as_layer_drop(num_ranks):
    batches = [batch(1, flag=False), batch(2, flag=False), batch(3, flag=True)]
    text = r"(?is)^(?=.*blocks\.1)(?=.*(layer.?drop|left out|leaves out))"
    assert_refused(LeftOutLater, *batches, num_ranks=num_ranks, match=text, call=2)


class Reversed(Chain):
    def forward(self, rows):
        hidden = self.begin(rows)
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return self.head(hidden)


@on_both
def test_points_in_the_order_of_calls_cut_blocks_that_run_in_another_order(num_ranks):
    points = tuple(f"blocks.{number}" for number in (3, 2, 1, 0))
    assert_right(Reversed, num_ranks=num_ranks, points=points)


@on_both
def test_points_in_another_order_are_refused_by_name_or_right(num_ranks):
    assert_right_or_refused(Reversed, num_ranks=num_ranks, match=r"blocks\.\d.*order|order.*blocks\.\d")


class Failing(Chain):
    """A forward of the user's that fails by itself in a later batch."""

    def forward(self, rows, flag=False):
        if flag:
            raise ValueError("the model says no")
        return super().forward(rows)


def test_an_error_of_the_models_own_is_told_as_its_own():
    parts = ps.cut(Failing().double(), ["blocks.*"])
    pipeline = ps.Pipeline(parts, "1f1b", 2, lambda output, target: output.mean(), ranks=1)
    keywords = batch(1)

    pipeline.step(**keywords, target=keywords["rows"])
    with pytest.raises(ps.PenstockError, match="the model says no"):
        pipeline.step(**keywords, flag=True, target=keywords["rows"])
