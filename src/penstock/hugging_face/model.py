"""`TransformersModel`: the layers of a causal language model of transformers, with its loss."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from penstock.errors import PenstockError
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.hugging_face.pretrained_out import save_pretrained
from penstock.models.cutting.part import CutPart
from penstock.models.layer import LayerSpec
from penstock.pipeline import Pipeline

IGNORED_LABEL = -100
Layer = LayerSpec | CutPart


class TransformersModel(LayersWithLoss[Layer]):
    """The layers of a causal language model, for `Pipeline(model, "1f1b", 8)`, which takes its `loss` and `count`.

    A batch is `pipeline.step(input_ids, target=labels, attention_mask=..., position_ids=...)`, as transformers takes
    it: labels are not shifted, the loss does it.
    """

    def __init__(self, layers: Sequence[Layer], whole: Any, source: Path | None) -> None:
        """`whole` is the model, on the meta device unless it was given; `source` is the folder it came from, if any."""
        self._layers = list(layers)
        self._loss: Callable[..., Tensor] = whole.loss_function
        self.whole = whole
        self.config = whole.config
        self.source = source

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the model's own loss, as the mean over the labels that count.

        `logits` is [batch, seq, vocabulary], `labels` [batch, seq] of int64. A label is compared with the logits at the
        position before it; -100 is left out.

        Raises:
            PenstockError: the shapes do not fit.
        """
        if logits.shape[:-1] != labels.shape:
            raise PenstockError(
                f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, but they have "
                f"{tuple(labels.shape)}; pass the input_ids, not shifted, with -100 where nothing is to be learned"
            )
        number = max(self.count(labels), 1)
        return self._loss(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=number)

    def save_pretrained(self, pipeline: Pipeline, folder: str | Path) -> None:
        """Write the weights of a pipeline of this model, and its config, as transformers saves them.

        Every rank calls it. `AutoModelForCausalLM.from_pretrained(folder)` then loads them. Tokenizer files of the
        folder that the model came from are copied.

        Raises:
            NotSaved: on every rank, if a file cannot be written, or the pipeline is of another model.
            PipelineError: a rank is lost meanwhile.
        """
        save_pretrained(pipeline, Path(folder), self.whole, self.source)

    @staticmethod
    def count(labels: Tensor) -> int:
        """Return how many labels the loss is the mean of: all but the first of each row, and those of -100."""
        return int((labels[..., 1:] != IGNORED_LABEL).sum())
