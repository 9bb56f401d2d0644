"""Features that are branches: on shapes, flags, values of the batch, values of the model, keywords that come and go."""

import torch

from tests.random_cut_models.features import Feature
from tests.random_cut_models.models import WIDTH
from tests.random_cut_models.values import At


class Padding(Feature):
    """Some batches bring a mask."""

    has_options = True
    kinds = ("argument", "around", "hidden", "inverted")

    def batch(self, draw, rows, length):
        return {"padding": torch.tensor([[draw.random() < 0.7 for _ in range(length)] for _ in range(rows)])}

    def before(self, model, run, place, block):
        if run.padding is None:
            return
        mask = run.padding.unsqueeze(-1).to(run.hidden.dtype)
        if self.kind == "around":
            run.hidden = run.hidden * mask
        elif self.kind == "hidden":
            run.kwargs["mask"] = mask * run.hidden.sigmoid().mean(-1, keepdim=True)
        else:
            run.kwargs["mask"] = 1 - mask if self.kind == "inverted" else mask


class Scale(Feature):
    """Some batches bring a tensor, which one block or all take."""

    has_options = True
    kinds = ("one", "all", "end", "gradient")

    def batch(self, draw, rows, length):
        return {"scale": torch.tensor([[[draw.random() + 0.5]] for _ in range(rows)], dtype=torch.float64)}

    def before(self, model, run, place, block):
        if run.scale is not None and (self.kind == "all" or (self.kind == "one" and place == self.place)):
            run.kwargs["factor"] = run.scale

    def end(self, model, run):
        if run.scale is not None and self.kind in ("end", "gradient"):
            run.hidden = run.hidden * run.scale


class FlagBranch(At):
    has_options = True
    kinds = ("scaled", "skip", "parameter", "mode")

    def build(self, model):
        if self.kind == "parameter":
            model.bend = torch.nn.Parameter(torch.randn(WIDTH) * 0.2)

    def batch(self, draw, rows, length):
        return {"flag": draw.random() < 0.8}

    def begin(self, model, run):
        run.begun = run.hidden
        super().begin(model, run)

    def apply(self, model, run):
        if run.flag and self.kind != "mode":
            bend = {"skip": lambda: run.begun, "parameter": lambda: model.bend}.get(self.kind, lambda: 0.3)()
            run.hidden = run.hidden * 0.5 + bend

    def before(self, model, run, place, block):
        if self.kind == "mode" and run.flag:
            run.kwargs["mode"] = "sigmoid" if place % 2 else "sin"


class LengthBranch(At):
    """A branch on the values of a tensor of the batch, which the first batches may not take."""

    has_options = True
    kinds = ("hidden mask", "batch mask", "maximum", "skip", "item", "own")

    def batch(self, draw, rows, length):
        return {"lengths": torch.tensor([draw.randint(1, length) for _ in range(rows)])}

    def begin(self, model, run):
        length = run.ids.shape[1]
        run.begun = run.hidden
        run.bend = None
        if run.lengths is not None and (run.lengths < length).any():
            keep = (torch.arange(length) < run.lengths[:, None]).unsqueeze(-1)
            run.bend = {
                "hidden mask": lambda: (run.hidden.abs().sum(-1, keepdim=True) > 2) & keep,
                "batch mask": lambda: keep,
                "maximum": lambda: torch.arange(length)[:, None] < run.lengths.max(),
                "skip": lambda: run.begun.tanh(),
                "item": lambda: run.lengths.float().mean().item() / length,
                "own": lambda: torch.tensor(float(run.lengths[0]) / length),
            }[self.kind]()
        super().begin(model, run)

    def apply(self, model, run):
        if run.bend is not None:
            run.hidden = run.hidden * run.bend


class ShapeBranch(At):
    """A branch on the length of the batch."""

    kinds = ("scaled", "skip", "sliced", "rows")

    def begin(self, model, run):
        run.start = run.hidden.sigmoid()
        super().begin(model, run)

    def apply(self, model, run):
        if run.hidden.shape[1] > 3:
            bend = {"skip": lambda: run.start, "sliced": lambda: run.start[:, :1]}.get(self.kind, lambda: 0.5)()
            run.hidden = run.hidden * bend
        if self.kind == "rows":
            run.hidden = run.hidden * len(run.hidden)


class ComputedBranch(At):
    """A branch on values that modules of the model computed."""

    weight = 0.3
    kinds = ("if", "item", "max", "float", "all", "tolist")

    def apply(self, model, run):
        hidden = run.hidden
        if self.kind == "if":
            run.hidden = hidden * 2 if hidden.mean() > 0 else hidden * 0.5
        elif self.kind == "all":
            run.hidden = hidden + 1 if torch.all(hidden.detach() < 1) else hidden
        else:
            number = {
                "item": lambda: hidden.mean().item(),
                "max": lambda: int(hidden.abs().max()),
                "float": lambda: float(hidden.detach().std()),
                "tolist": lambda: hidden.detach().mean((0, 1)).tolist()[0],
            }[self.kind]()
            run.hidden = hidden * (1 + number / 10)


class Integers(At):
    """Integer tokens that the model computes, such as the index of an expert or of the largest feature."""

    kinds = ("argmax", "sort", "bucket", "gather")

    def apply(self, model, run):
        hidden = run.hidden
        index = {
            "argmax": lambda: hidden.argmax(-1, keepdim=True),
            "sort": lambda: hidden.argsort(-1)[..., :1],
            "bucket": lambda: (hidden.detach().sum(-1, keepdim=True) > 0).long(),
            "gather": lambda: run.ids.unsqueeze(-1) % WIDTH,
        }[self.kind]()
        run.hidden = hidden + hidden.gather(-1, index)


class OptionalSkip(Feature):
    """A long skip in some batches only."""

    has_options = True

    def batch(self, draw, rows, length):
        return {"flag": True}

    def after(self, model, run, place, block):
        if place == self.place:
            run.maybe = run.hidden
        if place == self.later and run.flag:
            run.hidden = run.hidden + run.maybe.tanh()


class UnevenSkip(Feature):
    """A long skip in some microbatches only: those whose tokens have a certain value."""

    weight = 0.3
    kinds = ("tokens", "lengths")

    def after(self, model, run, place, block):
        if place == self.place:
            run.maybe = run.hidden
        if place == self.later and bool((run.ids[0, 0] > 3).item()):
            run.hidden = run.hidden + run.maybe.tanh()


class ModeBranch(At):
    """A branch on the mode of the model."""

    kinds = ("training", "grad")

    def apply(self, model, run):
        if model.training if self.kind == "training" else torch.is_grad_enabled():
            run.hidden = run.hidden * 0.6


class Plain(Feature):
    """Strings, numbers and None as arguments of blocks."""

    kinds = ("string", "number", "none", "size")

    def before(self, model, run, place, block):
        if self.kind == "string":
            run.kwargs["mode"] = ("tanh", "sin", "sigmoid")[place % 3]
        elif self.kind == "number":
            run.kwargs["factor"] = 1 / (1 + place)
        elif self.kind == "none":
            run.kwargs.update(mask=None, bias=None, factor=None if place else 0.5)
        elif self.kind == "size":
            run.kwargs["factor"] = run.hidden.shape[1] / 4


class ByName(Feature):
    """The hidden state is passed by its name."""

    def before(self, model, run, place, block):
        call = run.call
        run.call = lambda hidden, **kwargs: call(hidden=hidden, **kwargs)
