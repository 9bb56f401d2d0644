"""`TransformersModel`: the layers of a model of transformers, with its loss."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.execute.losses.chunked import AUTO, Chunk, LogProbsLoss
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.execute.losses.output import LossValue
from penstock.hugging_face.adapter_files import AdapterFormat, MergedFormat
from penstock.hugging_face.adapters import Adapter
from penstock.hugging_face.generation import Request, generate
from penstock.hugging_face.losses import Loss, ShiftedLoss, loss_of
from penstock.hugging_face.pretrained_out import PretrainedFormat, save_as
from penstock.hugging_face.weight_source import WeightSource, weight_source
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

    def log_probs(self, function: Callable[..., LossValue], *, chunk: Chunk = AUTO) -> LogProbsLoss:
        """Return a loss for `Pipeline` that computes `function(log_probs, target)`, as reinforcement learning needs it.

        `log_probs` [rows, length - 1], in float32, has the log-probability of each row's next token, which `target`
        says: labels [rows, length], or a dict that has them under 'labels' beside what else the function needs; it is
        0 for labels of -100. `function` returns what any loss does: a mean over rows, or over what the pipeline's
        `count` counts, and with `LossOutput` also values per token. The logits of `chunk` positions are in memory at a
        time; 'auto' takes so many that they are as large as the hidden states of a microbatch.

        Raises:
            ConfigError: `function` cannot be called, or `chunk` is no size; for the pipeline, the model is no decoder.
        """
        return LogProbsLoss(function, chunk=chunk)

    @property
    def shifts_labels(self) -> bool:  # type: ignore[override]
        """Whether the loss compares a label with the logits at the position before it."""
        return isinstance(self._loss, ShiftedLoss)

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
        adapter = None if merged else self.adapter
        name = "" if adapter is None else adapter.folder_name
        save_as(pipeline, Path(folder, name), self._whole_format if adapter is None else AdapterFormat(adapter))

    def weight_source(self, pipeline: Pipeline) -> WeightSource:
        """Return the weights of a pipeline of this model for processes that generate with them, such as vLLM.

        Every rank calls it, once; the source serves any number of updates. Its `metadata()` lists names, types and
        shapes as `save_pretrained` has them, and the rank that owns each tensor. A loop over it yields this rank's
        own tensors, whole, one after another. An adapter is merged into them, one tensor at a time.

        Raises:
            NotSaved: on every rank: the pipeline is of another model, or its adapter cannot be merged.
            PipelineError: a rank is lost meanwhile.
        """
        return weight_source(pipeline, self._whole_format)

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
    def _whole_format(self) -> PretrainedFormat:
        """The names and shapes that transformers gives the weights in files; an adapter is merged into them."""
        if self.adapter is not None:
            return MergedFormat.of(self.adapter, self.source)
        shared_names = {name for layer in self._layers if isinstance(layer, nn.Module) for name in _shared(layer)}
        return PretrainedFormat(self.whole, self.source, shared_names=shared_names)

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
