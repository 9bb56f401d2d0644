"""A case: one model, one schedule, one batch and one optimizer, all drawn from a seed."""

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.schedules import FAMILIES, Choice, build
from tests.random_models import more_layers  # noqa: F401 - enters its layers into the vocabulary
from tests.random_models.forms import FORMS
from tests.random_models.layers import KINDS
from tests.random_models.losses import OBJECTIVES
from tests.random_models.models import free_parameters
from tests.random_models.wrappers import COMPILED, RECOMPUTING

MAX_LAYERS = 10
TIES = ("parameter", "module", "option", "spec")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-6),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-6),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-6),
}
SPARSE_OPTIMIZERS = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01, eps=1e-6),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.005),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-6),
}
COMPILABLE = ("linear", "mlp", "norm", "Residual", "Masked", "Scaled", "CustomAffine", "relu_in_place", "Twice")
TRAINABLE = ("linear", "mlp", "norm", "Residual", "Einsum", "CustomAffine", "head")
FAMILY_NAMES = tuple(name for name in FAMILIES if name != "forward-only")


@dataclass(frozen=True)
class Entry:
    """One layer of a model."""

    kind: str
    seed: int
    wrappers: tuple = ()
    """From the innermost to the outermost."""
    frozen: str = ""
    """`all` or `part` of its parameters, or none."""

    def __str__(self):
        text = self.kind
        for name in self.wrappers:
            text = f"{name}({text})"
        return f"{text}{f' frozen:{self.frozen}' if self.frozen else ''}"


@dataclass(frozen=True)
class Tie:
    """Two places of a model that hold one parameter, or one layer."""

    how: str
    first: int
    second: int
    names: tuple = ()
    """The parameter's name in either layer."""


@dataclass(frozen=True)
class Case:
    """All that a run needs; the same seed draws the same case."""

    seed: int
    entries: tuple
    form: tuple
    """Its name and the places where it opens and ends; or nothing."""
    ties: tuple
    is_specs: bool
    family: str
    shape: tuple
    """Arguments of `build`, as pairs."""
    split: tuple | None
    loss: str
    scale: float
    rows: tuple
    """Of every microbatch."""
    cut: str
    """How the batch is cut: `even`, `ragged` or `sizes`."""
    keywords: tuple
    dtype: str
    optimizer: str
    sparse_optimizer: str
    options: tuple
    """Further keywords of the pipeline, as pairs."""
    passes: str
    """Which ranks pass the batch: `all`, or those that need it."""
    is_on_processes: bool
    lists_by: str
    """What the optimizer is made of: `named_parameters` or `parameters`."""
    offloaded: tuple
    """The stages whose activations move to the host and back."""

    @property
    def schedule(self):
        return build(self.family, **dict(self.shape))

    @property
    def takes(self):
        """Per layer, the keywords that it takes."""
        same = {tie.second: tie.first for tie in self.ties if tie.how == "module"}
        return [KINDS[self.entries[same.get(place, place)].kind].takes for place in range(len(self.entries))]

    @property
    def has_tokens(self):
        return self.entries[0].kind.endswith("embedding")

    @property
    def is_bitwise(self):
        """Whether numerics.md says that bits agree, but for what is tied."""
        is_strided = any(KINDS[entry.kind].is_strided for entry in self.entries)
        is_strided |= bool(self.form) and FORMS[self.form[0]].is_strided
        # Such a layer returns the very tensor that it got, and its form returns that beside it.
        is_twice = self.form[:1] == ("with input",) and self.entries[self.form[1]].kind == "PassesThrough"
        is_main = dict(self.options).get("main_gradients", False)
        schedule = self.schedule
        keeps_order = all(
            in_order(schedule, Kind.BACKWARD, kind) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        return keeps_order and not is_strided and not is_twice and not is_main

    @property
    def splits_backwards(self):
        return bool(np.isin(Kind.BACKWARD_WEIGHT, self.schedule.kind))

    def __str__(self):
        shape = " ".join(f"{name}={value}" for name, value in self.shape)
        lines = [f"{self.family} {shape}, layers per stage {self.split or 'even'}, {self.dtype}"]
        lines += [f"  {place}: {entry}" for place, entry in enumerate(self.entries)]
        lines += [f"  {tie}" for tie in self.ties]
        lines += [f"  form {self.form}"] if self.form else []
        lines += [f"  loss {self.loss} x {self.scale}, rows {self.rows} {self.cut}, keywords {self.keywords}"]
        lines += [f"  {self.optimizer} {self.sparse_optimizer}, {dict(self.options)}, passed by {self.passes}"]
        lines += [
            f"  specs={self.is_specs} processes={self.is_on_processes} {self.lists_by} offloaded={self.offloaded}"
        ]
        return "\n".join(lines)


def in_order(schedule, *kinds):
    """Whether every stage runs these kinds microbatch by microbatch, as one process does."""
    if schedule.num_slices > 1 or len(schedule.placement.routes) > 1:
        return False
    kinds = np.isin(schedule.kind, kinds)
    stages = [schedule.microbatch[kinds & (schedule.stage == stage)] for stage in range(schedule.num_stages)]
    return all((np.diff(microbatches) >= 0).all() for microbatches in stages)


# ---- drawing


def draw_case(seed):
    """Draw a case."""
    return _Draw(seed).case()


class _Draw:
    """One drawing; what is drawn later may depend on what was drawn before."""

    def __init__(self, seed):
        self.seed = seed
        self.random = random.Random(seed)

    def chance(self, share):
        return self.random.random() < share

    def case(self):
        draw = self.random
        self.compiles = self.chance(0.02)
        family, shape, schedule = self.schedule()
        self.has_slices = schedule.num_slices > 1
        self.keeps_order = in_order(schedule, Kind.FORWARD)
        num_stages = len(schedule.placement.routes[0])
        loss = draw.choice(list(OBJECTIVES))
        entries = self.entries(draw.randint(max(3, num_stages), MAX_LAYERS), OBJECTIVES[loss].is_of_words)
        is_specs = self.chance(0.2)
        ties = () if self.compiles else self.ties(entries, is_specs)
        form = self.form(len(entries)) if self.chance(0.3) else ()
        rows, cut = self.rows(schedule.num_microbatches)
        found = Case(
            seed=self.seed,
            entries=entries,
            form=form,
            ties=ties,
            is_specs=is_specs,
            family=family,
            shape=tuple(shape.items()),
            split=self.split(len(entries), num_stages) if self.chance(0.6) else None,
            loss=loss,
            scale=draw.choice([1.0, 1.0, 1.0, 0.5, 3.0]),
            rows=rows,
            cut=cut,
            keywords=(),
            dtype="float64",
            optimizer=draw.choice(list(OPTIMIZERS)),
            sparse_optimizer=draw.choice(list(SPARSE_OPTIMIZERS)),
            options=self.options(entries[0].kind == "sparse_embedding"),
            passes=draw.choice(["all", "all", "needed"]),
            is_on_processes=self.needs_processes(ties, is_specs) or self.chance(0.03),
            lists_by=draw.choice(["named_parameters", "parameters"]),
            offloaded=self.offloaded(schedule.num_stages),
        )
        taken = sorted({name for names in found.takes for name in names})
        found = replace(found, keywords=tuple(name for name in taken if self.chance(0.8)))
        is_float32 = found.is_bitwise and not ties and self.chance(0.5)
        return replace(found, dtype="float32") if is_float32 else found

    def needs_processes(self, ties, is_specs):
        """Threads would share what the builders of specs share, and torch compiles for one thread at a time."""
        return self.compiles or (is_specs and any(tie.how == "parameter" for tie in ties))

    def schedule(self):
        """Draw until a family takes the shape and a model has layers for its stages."""
        draw = self.random
        while True:
            family = FAMILIES[draw.choice(FAMILY_NAMES)]
            shape = {"ranks": draw.randint(1, 4), "microbatches": draw.randint(1, 8)}
            if 0 in family.stages_per_rank and self.chance(0.7):
                shape["stages_per_rank"] = draw.randint(1, 3)
            if family.takes_slices and self.chance(0.6):
                shape["slices"] = draw.choice([2, 3])
            for name, option in family.options.items():
                if self.chance(0.4):
                    shape[name] = draw.choice(option.choices) if isinstance(option, Choice) else draw.randint(1, 6)
            try:
                schedule = build(family.name, **shape)
            except ConfigError:
                continue
            if len(schedule.placement.routes[0]) <= MAX_LAYERS:
                return family.name, shape, schedule

    def entries(self, num_layers, is_of_words):
        draw = self.random
        first = [draw.choice(["embedding", "embedding", "sparse_embedding"])] if is_of_words or self.chance(0.3) else []
        last = ["head"] if is_of_words else []
        suited = [name for name, kind in KINDS.items() if not kind.is_end and self.is_suited(kind)]
        middle = [draw.choice(suited) for _ in range(num_layers - len(first) - len(last))]
        entries = [Entry(name, draw.randrange(10**6)) for name in [*first, *middle, *last]]
        num_frozen = draw.randint(1, num_layers - 1) if self.chance(0.15) else 0
        entries = [self.dressed(entry, place < num_frozen) for place, entry in enumerate(entries)]
        if not any(entry.kind in TRAINABLE and not entry.frozen for entry in entries):
            place = draw.choice([place for place, entry in enumerate(entries) if not KINDS[entry.kind].is_end])
            entries[place] = Entry("mlp", draw.randrange(10**6))
        return tuple(entries)

    def is_suited(self, kind):
        if self.has_slices and (kind.looks_around or kind.has_state or "table" in kind.takes):
            return False
        return not kind.has_state or self.keeps_order

    def dressed(self, entry, is_frozen):
        """Freeze a layer, and put something around it."""
        draw, kind = self.random, KINDS[entry.kind]
        frozen = "all" if is_frozen else draw.choice(["all", "part"]) if self.chance(0.12) else ""
        wrappers = []
        if self.chance(0.3) and not kind.is_end:
            recomputing = [name for name in RECOMPUTING if name != "selective" or not kind.changes_product]
            names = [*(() if kind.has_state else recomputing), "forwards", "forwards"]
            wrappers.append(draw.choice(names))
        if self.chance(0.1):
            wrappers.append("forwards" if kind.takes else "sequential")
        if self.compiles and self.chance(0.3) and entry.kind in COMPILABLE:
            wrappers = [draw.choice(list(COMPILED))]
        return Entry(entry.kind, entry.seed, tuple(wrappers), frozen)

    def ties(self, entries, is_specs):
        """Draw up to two ties between layers."""
        if not self.chance(0.35):
            return ()
        found = []
        for _ in range(self.random.choice([1, 1, 2])):
            how = self.random.choice(["parameter", "option", "spec"] if is_specs else ["parameter", "module", "option"])
            used = {place for tie in found for place in (tie.first, tie.second)}
            tie = self.tied_layers(entries, used) if how == "module" else self.tied_parameters(entries, used, how)
            found += [tie] if tie else []
        return tuple(found)

    def tied_layers(self, entries, used):
        places = [
            place
            for place, entry in enumerate(entries)
            if not KINDS[entry.kind].is_end and not KINDS[entry.kind].has_state and place not in used
        ]
        if len(places) < 2:
            return None
        return Tie("module", *sorted(self.random.sample(places, 2)))

    def tied_parameters(self, entries, used, how):
        """Two parameters of one shape in different layers; often those of the embedding and the head."""
        ends = (0, len(entries) - 1)
        kinds = [(entries[place].kind, entries[place].frozen) for place in ends]
        if kinds == [("embedding", ""), ("head", "")] and not used & set(ends) and self.chance(0.5):
            return Tie(how, *ends, tuple(free_parameters(entries[place])[0][0] for place in ends))
        places = [p for p, entry in enumerate(entries) if p not in used and entry.kind != "sparse_embedding"]
        listed = [(place, name, shape) for place in places for name, shape in free_parameters(entries[place])]
        pairs = [(a, b) for a in listed for b in listed if a[0] < b[0] and a[2] == b[2]]
        if not pairs:
            return None
        (first, name, _), (second, other, _) = self.random.choice(pairs)
        return Tie(how, first, second, (name, other))

    def form(self, num_layers):
        first, last = sorted(self.random.sample(range(num_layers), 2))
        return self.random.choice(list(FORMS)), first, last

    def rows(self, num_microbatches):
        draw = self.random
        cut = "even" if self.has_slices else draw.choice(["even", "even", "ragged", "sizes"])
        each = draw.randint(1, 3)
        if cut == "even":
            return (each,) * num_microbatches, cut
        if cut == "ragged":
            more = draw.randint(0, num_microbatches - 1)
            return tuple(each + (index < more) for index in range(num_microbatches)), cut
        return tuple(draw.randint(1, 3) for _ in range(num_microbatches)), cut

    def split(self, num_layers, num_stages):
        ends = sorted(self.random.sample(range(1, num_layers), num_stages - 1))
        return tuple(np.diff([0, *ends, num_layers]).tolist())

    def offloaded(self, num_stages):
        """Draw stages by numbers of their own, so that the rest of a case does not depend on them."""
        draw = random.Random(f"offloaded {self.seed}")
        if draw.random() < 0.7:
            return ()
        return tuple(stage for stage in range(num_stages) if draw.random() < 0.8)

    def options(self, is_sparse):
        draw, found = self.random, {}
        if self.chance(0.25):
            found["debug"] = draw.choice(["messages", "values"])
        if self.chance(0.06) and not is_sparse:
            found["main_gradients"] = True
        if self.chance(0.1):
            found["ranges"] = True
        if self.chance(0.1):
            found["variable_shapes"] = True
        return tuple(found.items())
