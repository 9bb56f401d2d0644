"""Losses as users write them, with what a microbatch weighs by each; the plain side and the pipeline's side."""

from dataclasses import dataclass

from torch.nn import functional as F

import penstock as ps

IGNORED = -100


def squares(output, target):
    return F.mse_loss(output, target)


def squares_by_row(output, target):
    return ((output - target) ** 2).mean(-1).sum()


def squares_named(output, target):
    difference = output - target
    return {"squares": difference.square().mean(), "sizes": 0.1 * difference.abs().mean()}


def words(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def summed_words(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")


def counted_words(output, target):
    return ps.LossOutput(summed_words(output, target), count(target))


def divided_words(output, target):
    return summed_words(output, target) / count(target)


def total_of_named(output, target):
    return sum(squares_named(output, target).values())


def count(target):
    return (target != IGNORED).sum()


@dataclass(frozen=True)
class Objective:
    """A loss: the function for the pipeline, the one for plain torch, and by what a mean is weighted."""

    given: object
    loss: object
    by: str
    """`rows`, `sum` or `count`."""
    is_of_words: bool
    scale: float = 1.0

    def weights(self, targets):
        if self.by == "sum":
            return [1.0] * len(targets)
        measures = [float(count(target)) if self.by == "count" else float(len(target)) for target in targets]
        return [measure / sum(measures) for measure in measures]

    @property
    def options(self):
        """What the pipeline is told."""
        found = {"sum": {"reduction": "sum"}, "count": {"count": count}, "rows": {}}[self.by]
        return found | ({"scale_loss": self.scale} if self.scale != 1.0 else {})


OBJECTIVES = {
    "squares": Objective(squares, squares, "rows", False),
    "summed squares": Objective(squares_by_row, squares_by_row, "sum", False),
    "named squares": Objective(squares_named, total_of_named, "rows", False),
    "words": Objective(words, words, "count", True),
    "summed words": Objective(summed_words, summed_words, "sum", True),
    "counted words": Objective(counted_words, divided_words, "count", True),
}
