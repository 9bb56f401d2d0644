"""A trial of one family: whether a pipeline of its model computes what the model itself computes, in each form.

right      gradients within 1e-6 of the largest one, loss and logits likewise
leaks      right, but in packed rows the model itself lets the second document see the first
refused    by an error of Penstock, with its words
WRONG      anything else
"""

import copy
import inspect
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import penstock as ps
from scripts.family_trials.families import BEGIN_OF_SECOND, ROWS, Family, TrialBatch, batch_of
from tests.support.local_pipelines import on_ranks

RIGHT, LEAKS, REFUSED, WRONG, UNKNOWN = "right", "leaks", "refused", "WRONG", "-"
FORMS = ("plain", "padded", "packed", "folder in", "folder out")
LARGEST = 1e-6
"""The largest difference of gradients, as a share of the largest gradient; and of losses and logits."""
MICROBATCHES = 2
FOREIGN = re.compile(r": (?!PenstockError|ConfigError)\w+(Error|Exception): ")
"""In the words of a rank that failed: an error that Penstock did not raise, and so no refusal."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one form."""

    word: str
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a step of one batch computes."""

    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]


class NotEqual(Exception):
    """A pipeline computed something else than the model."""


def trial(family: Family) -> dict[str, Any]:
    """Return the verdict of each form, and the name of the model's class."""
    model = family.model()
    verdicts = {form: _verdict(lambda form=form: _trial_of_batch(family, model, form)) for form in FORMS[:3]}
    verdicts["folder in"] = _verdict(lambda: _trial_of_folder(family, model))
    verdicts["folder out"] = _verdict(lambda: _trial_of_saving(family, model, verdicts["folder in"]))
    return {"class": type(model).__name__, "forms": {form: asdict(verdict) for form, verdict in verdicts.items()}}


def _verdict(run_form: Callable[[], Verdict]) -> Verdict:
    try:
        return run_form()
    except ps.PenstockError as error:
        return Verdict(WRONG if FOREIGN.search(str(error)) else REFUSED, str(error))
    except NotEqual as error:
        return Verdict(WRONG, str(error))
    except Exception as error:
        return Verdict(WRONG, f"{type(error).__name__}: {error}")


def _trial_of_batch(family: Family, model: Any, form: str) -> Verdict:
    batch = batch_of(family, model, form)
    if batch is None:
        return Verdict(UNKNOWN, "the model takes no such batch")
    for ranks in (1, 2):
        try:
            _require_equal(model, copy.deepcopy(model), batch, ranks)
        except NotEqual:  # in float32 a router may choose another expert by rounding alone
            double_model = _in_float64(model)
            _require_equal(double_model, copy.deepcopy(double_model), _batch_in_float64(batch), ranks)
    return Verdict(LEAKS) if form == "packed" and _leak(model, batch) > LARGEST else Verdict(RIGHT)


def _trial_of_folder(family: Family, model: Any) -> Verdict:
    batch = batch_of(family, model, "plain")
    assert batch is not None, "every family has a plain batch"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded_model = type(model).from_pretrained(folder).train()
        state, loaded_state = model.state_dict(), loaded_model.state_dict()
        if not all(torch.equal(tensor, loaded_state[name]) for name, tensor in state.items()):
            return Verdict(UNKNOWN, "transformers loads other weights than it saved")
        try:
            _require_equal(loaded_model, folder, batch, 2)
        except NotEqual:
            double_model = _in_float64(loaded_model)
            _require_equal(double_model, folder, _batch_in_float64(batch), 2, dtype=torch.float64)
    return Verdict(RIGHT)


def _trial_of_saving(family: Family, model: Any, folder_in: Verdict) -> Verdict:
    if folder_in.word == UNKNOWN:
        return folder_in
    batch = batch_of(family, model, "plain")
    assert batch is not None, "every family has a plain batch"
    layers = _layers(copy.deepcopy(model), batch)
    with tempfile.TemporaryDirectory() as folder:

        def save(transport: Any) -> None:
            pipeline = _pipeline(layers, transport)
            layers.save_pretrained(pipeline, folder)
            pipeline.close()

        on_ranks(2, save)
        loaded_model = type(model).from_pretrained(folder).train()
    with torch.no_grad():
        logits, saved_logits = (_forward(each, batch).logits for each in (model, loaded_model))
    if not _share(saved_logits, logits, logits) <= LARGEST:
        raise NotEqual(f"logits of the saved model differ by {_share(saved_logits, logits, logits):.1e}")
    return Verdict(RIGHT)


def _require_equal(model: Any, source: Any, batch: TrialBatch, ranks: int, **options: Any) -> None:
    """Compare two steps of a pipeline with the model itself. Raises: NotEqual."""
    layers = _layers(source, batch, **options)
    reference = _sums_of_model(copy.deepcopy(model), batch, layers)
    ties = dict(getattr(model, "all_tied_weights_keys", {}))
    for steps in zip(*on_ranks(ranks, lambda transport: _sums_of_pipeline(layers, transport, batch)), strict=True):
        gradients = {name: gradient for sums in steps for name, gradient in sums.gradients.items()}
        logits = next(sums.logits for sums in steps if sums.logits is not None)
        _compare(reference, Sums(steps[0].loss, logits, gradients), ties, f"{ranks} ranks")


def _compare(reference: Sums, sums: Sums, ties: dict[str, str], where: str) -> None:
    expected_gradients = {ties.get(name, name): gradient for name, gradient in reference.gradients.items()}
    lost = expected_gradients.keys() - {ties.get(name, name) for name in sums.gradients}
    if lost:
        raise NotEqual(f"{where}: no gradient of {min(lost)} and {len(lost) - 1} more")
    if not abs(sums.loss - reference.loss) <= LARGEST * abs(reference.loss):
        raise NotEqual(f"{where}: the loss is {sums.loss:.7g}, not {reference.loss:.7g}")
    if sums.logits.shape != reference.logits.shape:
        raise NotEqual(f"{where}: logits of shape {tuple(sums.logits.shape)}, not {tuple(reference.logits.shape)}")
    if not _share(sums.logits, reference.logits, reference.logits) <= LARGEST:
        raise NotEqual(f"{where}: logits differ by {_share(sums.logits, reference.logits, reference.logits):.1e}")
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in sums.gradients.items():
        expected = expected_gradients.get(ties.get(name, name), torch.zeros(()))
        if not _share(gradient, expected, largest) <= LARGEST:
            raise NotEqual(f"{where}: the gradient of {name} differs by {_share(gradient, expected, largest):.1e}")


def _share(tensor: Tensor, expected: Tensor, largest: Tensor) -> float:
    return float((tensor - expected).abs().max() / largest.abs().max())


def _sums_of_model(model: Any, batch: TrialBatch, layers: Any) -> Sums:
    """Return the loss of the whole batch, and the sums of its microbatches, weighted as those of a pipeline."""
    with torch.no_grad():
        loss = float(_forward(model, batch, labels=batch.labels).loss)
    parts = [_rows_of(batch, index) for index in range(MICROBATCHES)]
    outputs = [_forward(model, part, labels=part.labels) for part in parts]
    counts = [1 if layers.count is None else int(layers.count(part.labels)) for part in parts]
    for output, count in zip(outputs, counts, strict=True):
        (output.loss * count / sum(counts)).backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return Sums(loss, torch.cat([output.logits.detach() for output in outputs]), gradients)


def _rows_of(batch: TrialBatch, index: int) -> TrialBatch:
    """Return a microbatch. Patches of images are several for each row."""
    keywords = {name: tensor.chunk(MICROBATCHES)[index] for name, tensor in batch.keywords.items()}
    return TrialBatch(keywords, batch.labels.chunk(MICROBATCHES)[index])


def _forward(model: Any, batch: TrialBatch, **more: Any) -> Any:
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters or ("kwargs" in parameters and hasattr(model.config, "use_cache")):
        more["use_cache"] = False
    return model(**batch.keywords, **more)


def _layers(source: Any, batch: TrialBatch, **options: Any) -> Any:
    has_example = "example" in inspect.signature(ps.from_transformers).parameters
    return ps.from_transformers(source, **options, **({"example": batch.keywords} if has_example else {}))


def _pipeline(layers: Any, transport: Any) -> ps.Pipeline:
    options: dict[str, Any] = {"transport": transport}
    return ps.Pipeline(layers, "1f1b", MICROBATCHES, layers.loss, count=layers.count, **options)


def _sums_of_pipeline(layers: Any, transport: Any, batch: TrialBatch) -> list[Any]:
    """Return the sums of two steps on one rank; the second step runs blocks without the frame around them."""
    pipeline = _pipeline(layers, transport)
    steps = []
    for _ in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        result = pipeline.step(**batch.keywords, target=batch.labels, return_outputs=True)
        gradients = {name: tensor.grad for name, tensor in pipeline.named_parameters() if tensor.grad is not None}
        steps.append(Sums(float(result.loss), result.outputs, gradients))
    pipeline.close()
    return steps


def _in_float64(model: Any) -> Any:
    """Return a copy in float64, of which experts run one after another: their grouped product takes no float64."""
    double_model = copy.deepcopy(model).double()
    if hasattr(double_model, "set_experts_implementation"):
        double_model.set_experts_implementation("eager")
    return double_model


def _batch_in_float64(batch: TrialBatch) -> TrialBatch:
    keywords = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.keywords.items()
    }
    return TrialBatch(keywords, batch.labels)


def _leak(model: Any, batch: TrialBatch) -> float:
    """Return by how much logits of second documents change with the first ones, as a share of the largest logit."""
    tokens = batch.keywords["input_ids"].clone()
    tokens[:, :BEGIN_OF_SECOND] = tokens[:, :BEGIN_OF_SECOND].roll(ROWS // 2, 0)
    other = TrialBatch(batch.keywords | {"input_ids": tokens}, batch.labels)
    with torch.no_grad():
        logits, other_logits = (_forward(model, each).logits[:, BEGIN_OF_SECOND:] for each in (batch, other))
    return _share(other_logits, logits, logits)
