"""`TransformersModel`: the layers of a model of transformers, with its loss."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.hugging_face.generation import Request, generate
from penstock.hugging_face.losses import Loss, loss_of
from penstock.hugging_face.pretrained_out import save_pretrained
from penstock.models.cutting.part import CutPart
from penstock.models.layer import LayerSpec
from penstock.pipeline import Pipeline

Layer = LayerSpec | CutPart


class TransformersModel(LayersWithLoss[Layer]):
    """The layers of a model of transformers, for `Pipeline(model, "1f1b", 8)`, which takes its `loss` and `count`.

    A batch is `pipeline.step(input_ids, target=labels, attention_mask=..., position_ids=...)`, as transformers takes
    it. Labels of causal decoders are not shifted, the loss does it.
    """

    def __init__(self, layers: Sequence[Layer], whole: Any, source: Path | None, *, is_decoder: bool) -> None:
        """`whole` is the model, on the meta device unless it was given; `source` is the folder it came from, if any."""
        self._layers = list(layers)
        self._loss = loss_of(whole)
        self.whole = whole
        self.config = whole.config
        self.source = source
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

    def save_pretrained(self, pipeline: Pipeline, folder: str | Path) -> None:
        """Write the weights of a pipeline of this model, and its config, as transformers saves them.

        Every rank calls it. `from_pretrained(folder)` of the model's class then loads them. Files of the tokenizer and
        the processor are copied from the folder that the model came from.

        Raises:
            NotSaved: on every rank, if a file cannot be written, or the pipeline is of another model.
            PipelineError: a rank is lost meanwhile.
        """
        shared_names = {name for layer in self._layers if isinstance(layer, nn.Module) for name in _shared(layer)}
        save_pretrained(pipeline, Path(folder), self.whole, self.source, shared_names=shared_names)

    def generate(
        self,
        pipeline: Pipeline,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Tensor:
        """Return prompts and the tokens that follow them, [rows, length] of int64, as `generate` of transformers does.

        Every rank calls it, with the same arguments. Prompts are [rows, length], padded on the left, with zeros in
        `attention_mask` there. Each rank keeps keys and values of its own layers until the call ends. A row ends with
        `eos_token_id`, by default that of the model's `generation_config`, and is padded then; `()` ends none.

        With a `temperature` of 0 each token is the likeliest one. Otherwise it is drawn with `top_k`, `top_p` and
        `seed`: the tokens are those of transformers with `do_sample=True` after `torch.manual_seed(seed)`. Other
        settings of `generation_config` by which it takes other tokens, such as penalties, are refused.

        Raises:
            ConfigError: on every rank: the model cannot be read with a cache, or an argument is wrong.
            PipelineError: on every rank: a rank passes something else, or is lost.
        """
        request = Request(
            tokens=input_ids,
            mask=attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos_token_id=eos_token_id,
        )
        return generate(pipeline, self.whole, request)

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
