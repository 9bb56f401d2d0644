"""Containers and objects that a cut model's forward gives to its blocks: refused where blocks fill them, else right."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.support.cut_cases import WIDTH, Chain, assert_right, assert_right_or_refused, batch

on_both = pytest.mark.parametrize("num_ranks", [1, 2])


class Filling(nn.Module):
    """A block that gets an object of the forward as `seen`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, seen):
        change = self.inner(hidden).tanh()
        return hidden + change * self.fill(seen, change)

    def fill(self, seen, change):
        seen["number"] = seen.get("number", 0) + 1
        return seen["number"]


class Filled(Chain):
    """A dict in which blocks count."""

    block = Filling

    def forward(self, rows):
        hidden, seen = self.begin(rows), self.container(rows)
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.head(hidden)

    def container(self, rows):
        return {}


class Means(Filled):
    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.setdefault("means", []).append(change.detach().mean())
            return 1 + sum(seen["means"])


class Shared(Filled):
    """Keys that the first block makes, and all later ones take."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            if "key" not in seen:
                seen["key"] = change.mean(1, keepdim=True)
            return seen["key"]


class Losses(Filled):
    """Blocks put losses of their own into a list that the forward adds up."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.append(change.square().mean())
            return 1

    def forward(self, rows):
        hidden, seen = self.begin(rows), []
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.head(hidden), sum(seen, torch.zeros(()))


class Positions(Filled):
    """A set to which each block adds its place."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.add(len(seen))
            return len(seen)

    def container(self, rows):
        return set()


class Cache:
    """As the caches of transformers: an object with lists and a number."""

    def __init__(self):
        self.keys, self.number = [], 0

    def update(self, key):
        self.keys.append(key)
        self.number += 1
        return torch.stack(self.keys).sum(0)


class Cached(Filled):
    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            return seen.update(change.mean(1, keepdim=True))

    def container(self, rows):
        return Cache()


class NumberOnly(Cached):
    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.number += 1
            return seen.number


@dataclass
class Record:
    total: float = 0.0
    values: list = field(default_factory=list)


class Recorded(Filled):
    """A dataclass, whose number blocks add to."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.total = seen.total + change.detach().mean()
            return 1 + seen.total

    def container(self, rows):
        return Record()


class Nested(Filled):
    """A list within a tuple."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen[1]["inner"].append(1)
            return len(seen[1]["inner"])

    def container(self, rows):
        return (rows, {"inner": []})


class Stacked(Filled):
    """A list as a stack: some blocks push, others pop."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            if len(seen) < 2:
                seen.append(change)
                return 1
            return seen.pop(0)

    def container(self, rows):
        return []


class InPlaceTensor(Filled):
    """A tensor of the forward, which blocks change in place."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            seen.add_(1)
            return seen

    def container(self, rows):
        return torch.zeros((), dtype=torch.float64)


KINDS = [Filled, Means, Shared, Positions, Cached, NumberOnly, Recorded, Nested, Stacked, InPlaceTensor]


@on_both
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_blocks_fill_is_refused_by_its_argument_or_right(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=r"\bseen\b")


def with_loss(output, target):
    return (output[0] - target).square().mean() + output[1]


@on_both
def test_a_list_of_losses_is_right_or_refused_with_the_way_to_train_them(num_ranks):
    assert_right_or_refused(Losses, num_ranks=num_ranks, match=r"(?s)\bseen\b.*AuxiliaryLoss", loss=with_loss)


class OfTheModel(Filled):
    """The container is the model's own, and lives on."""

    def build(self):
        self.memory = {}

    def container(self, rows):
        return self.memory


class ByName(Filled):
    def forward(self, rows):
        hidden, seen = self.begin(rows), {}
        for block in self.blocks:
            hidden = block(hidden=hidden, seen=seen)
        return self.head(hidden) * seen["number"]


class FilledByForward(Filled):
    """The forward itself fills it, of values of modules, and blocks read it."""

    class block(Filling):  # noqa: N801
        def fill(self, seen, change):
            return 1 + sum(seen)

    def forward(self, rows):
        hidden, seen = self.begin(rows), []
        for block in self.blocks:
            hidden = block(hidden, seen)
            seen.append(hidden.mean())
        return self.head(hidden)


@on_both
@pytest.mark.parametrize("kind", [OfTheModel, ByName])
def test_a_container_of_the_model_or_passed_by_name_is_refused_or_right(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=r"\bseen\b|\bmemory\b")


@on_both
def test_a_list_that_the_forward_fills_is_right_or_refused(num_ranks):
    assert_right_or_refused(FilledByForward, num_ranks=num_ranks, match=r"\bseen\b|blocks\.\d")


class Noting(Chain):
    """Blocks note on themselves how often they ran, which the forward reads behind them."""

    class block(Filling):  # noqa: N801
        def forward(self, hidden):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(hidden, {})

    def forward(self, rows):
        return super().forward(rows) * (1 + sum(getattr(block, "calls", 0) for block in self.blocks))


class NotingLosses(Chain):
    """Blocks note a loss on themselves, as many mixtures of experts do."""

    class block(Filling):  # noqa: N801
        def forward(self, hidden):
            self.loss = hidden.square().mean()
            return super().forward(hidden, {})

    def forward(self, rows):
        output = super().forward(rows)
        return output, sum(block.loss for block in self.blocks)


@on_both
def test_numbers_that_blocks_note_on_themselves_are_refused_or_right(num_ranks):
    assert_right_or_refused(Noting, num_ranks=num_ranks, match=r"\bcalls\b")


@on_both
def test_losses_that_blocks_note_on_themselves_are_refused_or_right(num_ranks):
    assert_right_or_refused(NotingLosses, num_ranks=num_ranks, match=r"\bloss\b", loss=with_loss)


# ---- what is right


class Reading(Filling):
    """A block that reads from an object, whatever it is."""

    def fill(self, seen, change):
        parts = seen.values() if isinstance(seen, dict) else vars(seen).values() if hasattr(seen, "__dict__") else seen
        return sum(part.mean() if isinstance(part, torch.Tensor) else len(str(part)) / 4 for part in parts)


class Rotary(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


class ReadDict(Filled):
    block = Reading

    def container(self, rows):
        return {"mask": rows.sigmoid(), "kind": "full", "none": None}


class ReadTuple(ReadDict):
    def container(self, rows):
        positions = torch.arange(rows.shape[1]).double()[:, None]
        return Rotary(positions.cos(), positions.sin())


class ReadList(ReadDict):
    def container(self, rows):
        return [rows, rows.shape[1], "text"]


class ReadRecord(ReadDict):
    def container(self, rows):
        return Record(float(rows.shape[1]), [1, 2])


class EmptyCache(ReadDict):
    """A cache that no block fills."""

    def container(self, rows):
        return Cache()


@on_both
@pytest.mark.parametrize("kind", [ReadDict, ReadTuple, ReadList, ReadRecord, EmptyCache])
def test_a_container_that_blocks_only_read_is_right(kind, num_ranks):
    assert_right(kind, batch(1), batch(1), batch(2, 5), num_ranks=num_ranks)


class OfOne(Filled):
    """Each block gets a container of its own."""

    def forward(self, rows):
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden, {"number": 1})
        return self.head(hidden)


@on_both
def test_a_container_of_one_block_is_its_own_or_refused(num_ranks):
    assert_right_or_refused(OfOne, num_ranks=num_ranks, match=r"\bseen\b")


@dataclass
class Output:
    hidden: torch.Tensor
    second: torch.Tensor | None = None


class Dataclasses(Chain):
    """Blocks return dataclasses, whose second value goes to the next block."""

    class block(Filling):  # noqa: N801
        def forward(self, hidden, bias=None):
            change = self.inner(hidden).tanh()
            return Output(hidden + change * (1 if bias is None else bias), change.mean(1, keepdim=True))

    def forward(self, rows):
        output = Output(self.begin(rows))
        for block in self.blocks:
            output = block(output.hidden, output.second)
        return self.head(output.hidden)


@on_both
def test_blocks_that_return_dataclasses_are_right(num_ranks):
    assert_right(Dataclasses, num_ranks=num_ranks)
