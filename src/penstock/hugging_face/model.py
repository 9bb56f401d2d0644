"""`TransformersModel`: the layers of a model of transformers, with its loss."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.hugging_face.adapter_files import AdapterFormat, MergedFormat
from penstock.hugging_face.adapters import Adapter
from penstock.hugging_face.losses import Loss, loss_of
from penstock.hugging_face.pretrained_out import PretrainedFormat, SavedFormat, save_as
from penstock.models.cutting.part import CutPart
from penstock.models.layer import LayerSpec
from penstock.pipeline import Pipeline

Layer = LayerSpec | CutPart


class TransformersModel(LayersWithLoss[Layer]):
    """The layers of a model of transformers, for `Pipeline(model, "1f1b", 8)`, which takes its `loss` and `count`.

    A batch is `pipeline.step(input_ids, target=labels, attention_mask=..., position_ids=...)`, as transformers takes
    it. Labels of causal decoders are not shifted, the loss does it.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        whole: Any,
        source: Path | None,
        *,
        is_decoder: bool,
        adapter: Adapter | None = None,
    ) -> None:
        """`whole` is the model, on the meta device unless it was given; `source` is the folder it came from, if any.

        `adapter` is the adapter of peft in it, if any.
        """
        self._layers = list(layers)
        self._loss = loss_of(whole)
        self.whole = whole
        self.config = whole.config
        self.source = source
        self.adapter = adapter
        self.is_decoder = is_decoder
        """Whether it is a causal decoder of text alone."""

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def loss(self, logits: Any, labels: Tensor) -> Tensor:
        """Return the model's own loss, as the mean over the labels that count.

        `logits` is [batch, seq, vocabulary], `labels` [batch, seq] of int64, and -100 is left out. Causal decoders
        compare a label with the logits at the position before it, other models with those at its own. Classifiers of
        sequences and images have one label for each row, as `problem_type` of their config says.

        Raises:
            PenstockError: the shapes do not fit, or the model has no loss that is known here.
        """
        return self._known_loss.mean(logits, labels)

    def save_pretrained(self, pipeline: Pipeline, folder: str | Path, *, merged: bool = False) -> None:
        """Write the weights of a pipeline of this model, and its config, as transformers saves them.

        Every rank calls it. `from_pretrained(folder)` of the model's class then loads them. Files of the tokenizer and
        the processor are copied from the folder that the model came from.

        Of a model with an adapter, the adapter alone is written, as peft saves it. With `merged`, it is merged into the
        weights, and the model is written; the pipeline stays as it is.

        Raises:
            NotSaved: on every rank, if a file cannot be written, the pipeline is of another model, or an adapter cannot
                be merged.
            PipelineError: a rank is lost meanwhile.
        """
        name = "" if self.adapter is None or merged else self.adapter.folder_name
        save_as(pipeline, Path(folder, name), self._format(merged=merged))

    def _format(self, *, merged: bool) -> SavedFormat:
        if self.adapter is not None:
            return MergedFormat.of(self.adapter, self.source) if merged else AdapterFormat(self.adapter)
        shared_names = {name for layer in self._layers if isinstance(layer, nn.Module) for name in _shared(layer)}
        return PretrainedFormat(self.whole, self.source, shared_names=shared_names)

    def count(self, labels: Tensor) -> int:
        """Return how many labels the loss is the mean of."""
        return self._known_loss.count(labels)

    @property
    def _known_loss(self) -> Loss:
        if self._loss is None:
            raise PenstockError(
                f"{type(self.whole).__name__} has no loss of labels that is known here; pass Pipeline a loss of yours, "
                "a function of the output and the target"
            )
        return self._loss


def _shared(layer: nn.Module) -> list[str]:
    """Return the names of parameters that a layer has under several names."""
    parameters = list(layer.named_parameters(remove_duplicate=False))
    number_by_id = Counter(id(parameter) for _, parameter in parameters)
    return [name for name, parameter in parameters if number_by_id[id(parameter)] > 1]
