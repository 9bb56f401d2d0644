"""A case: a model, the points where it is cut, its batches and a schedule, all drawn from a seed."""

import random

import torch
from torch.nn import functional as F

from tests.random_cut_models import branches, objects, states, values  # noqa: F401 - each enters its features
from tests.random_cut_models.features import FEATURES
from tests.random_cut_models.models import OUTPUTS, WIDTH, WORDS, Root
from tests.support.cut_models import Call, Course, leaves
from tests.support.draws import RecordedDraws

OTHER_SCHEDULES = ("zbv", "interleaved-1f1b")
TOGETHER = [
    ("SetAttribute", "Changed"),
    ("HiddenMask", "TokenMask", "SharedMask"),
    ("Frozen", "Detach"),
    ("Frozen", "GradientMode"),
    *(("ByName", name) for name in ("Hook", "BlockState", "BlockDropout", "Changed", "Notebook")),
]
"""Features of which a model has one: they overwrite each other's values, or nothing is left to train or to hook."""


def objective(output, target):
    """The squared error of the first output, and the means of all others."""
    tensors = [tensor for _, tensor in leaves(output)]
    return F.mse_loss(tensors[0], target) + sum(tensor.mean() for tensor in tensors[1:])


class Case:
    """The same seed draws the same case; `names` sets the features in place of those that are drawn."""

    def __init__(self, seed, names=None):
        self.seed, draw = seed, random.Random(seed)
        self.schedule = OTHER_SCHEDULES[seed // 4 % 2] if seed % 4 == 3 else "1f1b"
        self.depth = draw.randint(4 if seed % 4 == 3 else 3, 5)
        self.layout = draw.choice(["chain", "chain", "chain", "chain", "encoder", "tower"])
        self.num_microbatches = draw.randint(2, 4)
        drawn = sorted(FEATURES, key=lambda name: draw.random() ** (1 / FEATURES[name].weight))
        names = names or drawn[-num_features(draw) :]
        # Each from a generator of its own, so that a feature is the same beside fewer others.
        self.features = [FEATURES[name](random.Random(f"{seed} {name}"), self.depth) for name in compatible(names)]
        order = list(range(self.depth))
        called = order
        for feature in self.features:
            called = feature.order(called)
        # Points stand in the order of their calls, as docs/models.md asks.
        in_order = called if sorted(called) == order and called != order else None
        chain = ["blocks.*"] if in_order is None else [f"blocks.{index}" for index in called]
        self.points = [*([] if self.layout == "chain" else ["encoder.*"]), *chain]
        self.batches = self.drawn_batches(random.Random(f"{seed} batches"))

    def drawn_batches(self, draw):
        """List the calls: length, whether it trains, and keywords that some batches have."""
        has_state = any(feature.has_state for feature in self.features)
        comes_late = draw.random() < 0.6
        batches = []
        for number in range(4):
            is_training = has_state or draw.random() < 0.75
            has_options = draw.random() < 0.6 if number or not comes_late else False
            has_options |= number == 3
            batches.append((draw.choice([3, 3, 4]), is_training, has_options, draw.randrange(10**6)))
        return batches

    def course(self, num_ranks):
        torch.manual_seed(self.seed)
        kind = type("Model", (Root,), {
            "features": self.features, "layout": self.layout, "chain_order": tuple(range(self.depth)),
        })  # fmt: skip
        calls = [self.call(number, *batch) for number, batch in enumerate(self.batches)]
        return Course(
            kind().double(), calls, tuple(self.points), objective, num_ranks, self.num_microbatches,
            self.schedule if num_ranks > 1 else "1f1b", RecordedDraws(), {"seed": self.seed},
        )  # fmt: skip

    def call(self, number, length, is_training, has_options, seed):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = 2 * self.num_microbatches
        keywords = {"ids": torch.randint(WORDS, (rows, length), generator=generator)}
        if self.layout != "chain":
            keywords["source"] = torch.randn(rows, 2, WIDTH, generator=generator, dtype=torch.float64)
        for feature in self.features:
            if has_options or not feature.has_options:
                keywords |= feature.batch(draw, rows, length)
        target = torch.randn(rows, length, OUTPUTS, generator=generator, dtype=torch.float64)
        return Call(keywords, target, is_training, Change(self.features, number))

    def __str__(self):
        features = ", ".join(map(str, self.features)) or "plain"
        return f"{self.layout}, {self.depth} blocks, {self.num_microbatches} microbatches, {self.schedule}: {features}"


class Change:
    """The changes that a model's owner makes before a call."""

    def __init__(self, features, number):
        self.features, self.number = features, number

    def __call__(self, model):
        for feature in self.features:
            feature.change(model, self.number)


def num_features(draw):
    share = draw.random()
    return 1 if share < 0.2 else draw.randint(2, 3) if share < 0.6 else draw.randint(4, 8)


def compatible(names):
    chosen = []
    for name in names:
        if not any(name in group and other in group for other in chosen for group in TOGETHER):
            chosen.append(name)
    return chosen
