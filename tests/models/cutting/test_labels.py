"""What is computed from values that are not there is followed, also where it is a mask, a number or a view."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.labels import Labels
from tests.models.cutting.test_part import run

ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
KEPT = torch.arange(6) % 3 != 0
CPU = torch.device("cpu")


class Watched:
    """Notes what operators use and draw."""

    def __init__(self):
        self.used, self.draws = set(), []

    place = "behind 'words'"

    def use_labels(self, labels):
        self.used |= labels

    def draw(self, label, compute):
        self.draws.append(label)
        return compute(), False


def labelled(labels):
    leaf = torch.empty(6, 4, device="meta")
    labels.add_leaf(leaf, "words#0.0")
    return leaf


@pytest.mark.parametrize(
    ("compute", "is_labelled"),
    [
        (lambda known, leaf: leaf.sum(-1) > 0, True),
        (lambda known, leaf: known.clone().copy_(leaf), True),
        (lambda known, leaf: leaf.view(2, 12).T, True),
        (lambda known, leaf: leaf[KEPT], True),
        (lambda known, leaf: torch.cat([known, leaf]), True),
        (lambda known, leaf: leaf.to(torch.float64), True),
        (lambda known, leaf: torch.zeros_like(leaf), False),
        (lambda known, leaf: leaf.new_ones(3) + known.sum(), False),
        (lambda known, leaf: torch.arange(leaf.shape[0], device=leaf.device) > 2, False),
        (lambda known, leaf: known.double().to(leaf), False),
        (lambda known, leaf: known.sum(), False),
    ],
)
def test_what_is_computed_of_a_leaf_has_its_label_and_all_else_its_values(compute, is_labelled):
    watch = Watched()
    with Labels(watch, CPU) as labels:
        value = compute(ROWS, labelled(labels))
        assert labels.labels_of(value) == ({"words#0.0"} if is_labelled else set())
    assert watch.used == labels.labels_of(value)
    assert is_labelled or value.device == CPU


def test_rows_that_a_known_mask_selects_have_their_number():
    with Labels(Watched(), CPU) as labels:
        leaf = labelled(labels)

        assert leaf[KEPT].shape == leaf[KEPT, :].shape == (4, 4)
        assert (leaf[KEPT, :] + ROWS[KEPT]).shape == (4, 4)


def test_a_leaf_says_where_it_would_be_and_is_a_leaf_until_it_is_changed():
    with Labels(Watched(), CPU) as labels:
        leaf = labelled(labels)
        assert leaf.device == CPU
        assert leaf.is_cpu
        assert not leaf.is_meta
        assert labels.leaf_label(leaf) == "words#0.0"
        assert labels.leaf_label(leaf[0]) is None
        leaf[0] = 1
        assert labels.leaf_label(leaf) is None
    assert labels.changed_labels == {"words#0.0"}


def test_a_constant_that_gets_a_leaf_in_place_has_its_label_and_counts_as_changed():
    constant = torch.zeros(6, 4)
    version = constant._version
    with Labels(Watched(), CPU) as labels:
        constant[:3] = labelled(labels)[:3]
        assert labels.labels_of(constant.view(-1)) == {"words#0.0"}
    assert constant._version > version


@pytest.mark.parametrize(
    "read",
    [
        lambda leaf: bool((leaf > 0).any()),
        lambda leaf: leaf.sum().item(),
        lambda leaf: ROWS[leaf.sum(-1) > 0],
        lambda leaf: max(leaf.sum(-1)),
    ],
)
def test_a_python_value_or_a_shape_of_a_leaf_is_refused(read):
    with Labels(Watched(), CPU) as labels:
        with pytest.raises(PenstockError, match=r"behind 'words', .* decides by the value of a tensor.*'words'"):
            read(labelled(labels))
        assert not bool((torch.zeros(3) > 0).any())


def test_a_draw_is_a_leaf_of_its_own_also_in_place():
    watch = Watched()
    with Labels(watch, CPU) as labels:
        leaf = labelled(labels)
        dropped = nn.functional.dropout(leaf, 0.5, training=True)
        kept = nn.functional.dropout(leaf, 0.5, training=False)
        filled = torch.empty(3).bernoulli_(0.5)
        assert labels.labels_of(dropped) == {"draw dropout 0"}
        assert labels.labels_of(kept) == {"words#0.0"}
        assert labels.labels_of(filled) == {"draw bernoulli_ 1"}
    assert watch.draws == ["draw dropout 0", "draw bernoulli_ 1"]


def test_what_runs_in_a_pause_is_not_followed():
    watch = Watched()
    with Labels(watch, CPU) as labels:
        leaf = labelled(labels)
        with labels.paused():
            assert (leaf * 2).device.type == "meta"
    assert not watch.used


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden, kept=None):
        hidden = hidden + self.inner(hidden).tanh()
        return hidden if kept is None else hidden * kept[:, None]


class Pair(Block):
    def forward(self, hidden, kept=None):
        return super().forward(hidden, kept), kept


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", KEPT.clone())

    def forward(self):
        return self.kept


class Model(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.words, self.kept = nn.Linear(4, 4), Kept()
        self.register_buffer("mean", torch.zeros(4))
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, rows, kept=None):
        hidden = self.words(rows)
        kept = self.begin(hidden, kept)
        for block in self.blocks:
            hidden, kept = self.call(block, hidden, kept)
        return self.head(self.end(hidden))

    def begin(self, hidden, kept):
        return kept

    def call(self, block, hidden, kept):
        return block(hidden, kept), kept

    def end(self, hidden):
        return hidden


class Compared(Model):
    def begin(self, hidden, kept):
        return hidden.sum(-1) > 0


class FromBuffer(Model):
    def begin(self, hidden, kept):
        return self.kept()


class Deciding(Model):
    def begin(self, hidden, kept):
        return KEPT if hidden.mean() > 0 else None


class OwnBuffer(Model):
    def end(self, hidden):
        return hidden + self.mean


class Late(Model):
    def end(self, hidden):
        self.mean.copy_(hidden.detach().mean(0))
        return hidden


class Early(Model):
    def begin(self, hidden, kept):
        self.mean = hidden.detach().mean(0)
        return kept


class Passing(Model):
    block = Pair

    def call(self, block, hidden, kept):
        return block(hidden, kept)


@pytest.mark.parametrize("kind", [Compared, FromBuffer, OwnBuffer, Early])
def test_what_a_part_needs_of_earlier_layers_travels_to_it(kind):
    model = kind()
    assert torch.equal(run(cut(model, ["blocks.*"]), rows=ROWS), model(ROWS))


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Deciding, "decides by the value of a tensor"), (Late, "changes the buffer 'mean' behind its first point")],
)
def test_a_forward_that_no_part_can_repeat_is_refused(kind, words):
    with pytest.raises(PenstockError, match=words):
        run(cut(kind(), ["blocks.*"]), rows=ROWS)


def test_what_a_block_was_given_and_returns_is_there():
    model = Passing()
    parts = cut(model, ["blocks.*"])
    for kept in (KEPT, ~KEPT):
        assert torch.equal(run(parts, rows=ROWS, kept=kept), model(ROWS, kept))


def test_a_buffer_that_the_forward_sets_before_the_first_point_is_that_of_the_first_layer():
    model = Early()
    parts = cut(model, ["blocks.*"])
    run(parts, rows=ROWS)

    assert torch.equal(parts[0].state_dict()["mean"], model.words(ROWS).mean(0))
