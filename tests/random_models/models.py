"""Making the model and the batches of a case, the same at every call."""

import random
from dataclasses import dataclass, field

import torch

import penstock as ps
from penstock.execute.batch.microbatch import PreSplit
from tests.random_models.forms import FORMS, InForm, InFormWithKeywords
from tests.random_models.layers import KINDS, LENGTH, WIDTH
from tests.random_models.losses import IGNORED, OBJECTIVES
from tests.random_models.more_layers import NUM_WORDS
from tests.random_models.wrappers import WRAPPERS


def settle(module, seed):
    """Give parameters, and the vectors of a spectral norm, values that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4)
        for name, buffer in module.named_buffers():
            if name.endswith(("._u", "._v")):
                vector = torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
                buffer.copy_(vector / vector.norm())
    return module


def make_layer(entry, dtype=torch.float64):
    """Make a layer with all that is around it."""
    layer = settle(KINDS[entry.kind].make(random.Random(entry.seed), WIDTH, dtype), entry.seed)
    if entry.frozen:
        parameters = list(layer.parameters())
        for parameter in parameters if entry.frozen == "all" else parameters[: (len(parameters) + 1) // 2]:
            parameter.requires_grad_(False)
    for name in entry.wrappers:
        layer = WRAPPERS[name](layer)
    return layer


def free_parameters(entry):
    """List names and shapes of the parameters that a layer trains."""
    layer = make_layer(entry)
    return [(name, parameter.shape) for name, parameter in layer.named_parameters() if parameter.requires_grad]


def put_parameter(layer, name, new):
    """Put a parameter in the place of the one that has this name."""
    old = dict(layer.named_parameters(remove_duplicate=False))[name]
    for module in layer.modules():
        for own in [own for own, parameter in module.named_parameters(recurse=False) if parameter is old]:
            setattr(module, own, new)


@dataclass
class Model:
    """The layers of a case as a pipeline gets them, and as they are once they are built."""

    case: object
    listed: list = field(default_factory=list)
    """Modules, or `LayerSpec`s."""
    built: dict = field(default_factory=dict)
    """Per place, the module; those of specs once their builder has run."""
    tied: list = field(default_factory=list)
    """The pipeline's option of this name."""

    def name(self, place):
        return f"layer{place}" if self.case.is_specs else str(place)

    def named_parameters(self):
        """All names, with one parameter under each of its names; compiled modules have those of plain ones."""
        return {
            f"{self.name(place)}.{name}".replace("_orig_mod.", ""): parameter
            for place, layer in sorted(self.built.items())
            for name, parameter in layer.named_parameters(remove_duplicate=False)
        }

    def named_buffers(self):
        return {
            f"{self.name(place)}.{name}".replace("_orig_mod.", ""): buffer
            for place, layer in sorted(self.built.items())
            for name, buffer in layer.named_buffers()
        }


def make_plain(case):
    """Make the model for one process, where whatever is tied is one object."""
    return _make_modules(case, case.ties)


def make_listed(case):
    """Make the model as a user hands it to a pipeline."""
    if case.is_specs:
        return _make_specs(case)
    model = _make_modules(case, [tie for tie in case.ties if tie.how != "option"])
    model.listed = [model.built[place] for place in range(len(case.entries))]
    model.tied = _tied_option(model)
    return model


def _make_modules(case, ties):
    model = Model(case, built={place: _make(case, place) for place in range(len(case.entries))})
    for tie in ties:
        first, second = model.built[tie.first], model.built[tie.second]
        if tie.how == "module":
            model.built[tie.second] = first
        else:
            put_parameter(second, tie.names[1], dict(first.named_parameters())[tie.names[0]])
    model.built = {place: _in_form(case, place, layer) for place, layer in model.built.items()}
    return model


def _make_specs(case):
    model = Model(case)
    shared, tied = {}, {}
    for tie in case.ties:
        names = dict(zip((tie.first, tie.second), tie.names, strict=True))
        if tie.how == "parameter":
            parameter = dict(_make(case, tie.first).named_parameters())[tie.names[0]]
            shared |= {place: (name, parameter) for place, name in names.items()}
        if tie.how == "spec":
            first = f"{model.name(tie.first)}.{_name_in_form(case, tie.first, tie.names[0])}"
            tied[tie.second] = ((_name_in_form(case, tie.second, tie.names[1]), first),)

    def builder(place):
        def build():
            layer = _make(case, place)
            if place in shared:
                put_parameter(layer, *shared[place])
            model.built[place] = _in_form(case, place, layer)
            return model.built[place]

        return build

    model.listed = [
        ps.LayerSpec(model.name(place), builder(place), tied=tied.get(place, ())) for place in range(len(case.entries))
    ]
    model.tied = _tied_option(model)
    return model


def _tied_option(model):
    return [
        tuple(
            f"{model.name(place)}.{_name_in_form(model.case, place, name)}"
            for place, name in zip((tie.first, tie.second), tie.names, strict=True)
        )
        for tie in model.case.ties
        if tie.how == "option"
    ]


def _make(case, place):
    return make_layer(case.entries[place], getattr(torch, case.dtype))


def _in_form(case, place, layer):
    """Put what a form needs around a layer."""
    name, first, last = case.form or ("", 0, -1)
    if not first <= place <= last:
        return layer
    kind = InFormWithKeywords if case.takes[place] else InForm
    return kind(layer, FORMS[name], "opens" if place == first else "ends" if place == last else "carries")


def _name_in_form(case, place, name):
    """The name that a layer's parameter has once a form is around the layer."""
    layer = _make(case, place)
    parameter = dict(layer.named_parameters())[name]
    return next(name for name, other in _in_form(case, place, layer).named_parameters() if other is parameter)


# ---- batches


@dataclass
class Batch:
    """One batch, cut into microbatches as plain torch takes them, and whole as a pipeline takes it."""

    microbatches: list
    """Per microbatch its input, its keywords and its target."""
    given: object
    keywords: dict
    target: object


def make_batch(case, step):
    """Make the batch of a step; every step has another one."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    dtype = getattr(torch, case.dtype)
    common = {"scale": 0.5 + step, "table": torch.randn(LENGTH, WIDTH, generator=generator, dtype=dtype)}
    microbatches = []
    for rows in case.rows:
        keywords = {name: value for name, value in common.items() if name in case.keywords}
        keywords |= {name: _keyword(name, rows, generator) for name in case.keywords if name not in common}
        microbatches.append((_given(case, rows, generator), keywords, _target(case, rows, generator)))
    keywords = {
        name: common[name] if name in common else _whole(case, [each[1][name] for each in microbatches])
        for name in case.keywords
    }
    given, target = (_whole(case, [each[place] for each in microbatches]) for place in (0, 2))
    return Batch(microbatches, given, keywords, target)


def _whole(case, parts):
    return PreSplit([part.clone() for part in parts]) if case.cut == "sizes" else torch.cat(parts)


def _given(case, rows, generator):
    if case.has_tokens:
        return torch.randint(NUM_WORDS, (rows, LENGTH), generator=generator)
    return torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=getattr(torch, case.dtype))


def _target(case, rows, generator):
    if not OBJECTIVES[case.loss].is_of_words:
        return torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=getattr(torch, case.dtype))
    target = torch.randint(NUM_WORDS, (rows, LENGTH), generator=generator)
    return target.index_fill(1, torch.randint(LENGTH, (2,), generator=generator), IGNORED)


def _keyword(name, rows, generator):
    if name == "position":
        return torch.randint(8, (rows, LENGTH), generator=generator)
    chosen = torch.rand(rows, LENGTH, generator=generator) < 0.6
    chosen[:, 0] = True
    return chosen if name == "mask" else ~chosen  # a padding mask says what to leave out
