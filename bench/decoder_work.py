"""The work of a decoder's layers, written down by hand for runs that others measured with kernels of their own.

`penstock.sizing` counts the kernels that a model's own code starts on this machine. Published runs started others:
fused norms, Megatron's loss, FlashAttention. So the bytes of each style are listed here, and read out of no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.simulation.costs.layer_work import LayerWork, PassWork, Product

BYTES_EACH = 2
"""All of these runs compute in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The numbers of 16 bits that kernels other than products read and write, forward and backward, per feature."""

    norm: tuple[float, float]
    """A norm with the sum of the residual before it, per feature of the hidden values."""
    rotary: tuple[float, float]
    """Per feature of queries and keys."""
    activation: tuple[float, float]
    """Per feature of the feed-forward part, gate and all."""
    dropout: tuple[float, float]
    """With bias and residual, per feature of the hidden values; twice a layer."""
    loss: tuple[float, float]
    """Per word of the vocabulary."""
    kernels: tuple[int, int]
    """That a layer launches, beside its products."""


FUSED = Style(
    norm=(4, 4), rotary=(2, 2), activation=(3, 5), dropout=(0, 0), loss=(2, 3), kernels=(8, 12)
)  # fmt: skip
"""One kernel each, as torch.compile, Liger or Transformer Engine make them."""
EAGER = Style(
    norm=(21, 33), rotary=(10, 10), activation=(5, 9), dropout=(0, 0), loss=(7, 7), kernels=(45, 60)
)  # fmt: skip
"""One kernel for each operation of transformers' Llama: norms in 32 bits are eight of them."""
OWN = Style(
    norm=(5, 7), rotary=(9, 12), activation=(5, 9), dropout=(0, 0), loss=(7, 11), kernels=(22, 40)
)  # fmt: skip
"""`penstock.models` on torch 2.11: a fused RMSNorm, and a kernel for each other operation."""
MEGATRON = Style(
    norm=(2, 4), rotary=(0, 0), activation=(2, 3), dropout=(3.5, 2.5), loss=(19, 7), kernels=(6, 12)
)  # fmt: skip
"""Megatron-LM's fused kernels for norms, GeLU with bias, and dropout with bias and residual; its loss in 32 bits
converts, subtracts, exponentiates and divides all scores one after the other (`vocab_parallel_cross_entropy`)."""
STYLES = {"fused": FUSED, "eager": EAGER, "own": OWN, "megatron": MEGATRON}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    key_value_heads: int = 0
    """As many as heads unless given."""
    is_gated: bool = True

    @property
    def key_value_width(self) -> int:
        return self.hidden // self.heads * (self.key_value_heads or self.heads)

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Features in and out of each matrix of a layer."""
        width, inner = self.hidden, self.feed_forward
        keys_and_values = [(width, self.key_value_width)] * 2
        return (width, width), *keys_and_values, (width, width), *[(width, inner)] * (1 + self.is_gated), (inner, width)

    @property
    def layer_parameters(self) -> int:
        return sum(features_in * features_out for features_in, features_out in self.linears)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What of the work a run leaves to choose."""

    sequence: int
    microbatch: int = 1
    style: str = "fused"
    has_flash_attention: bool = True
    has_dropout: bool = False
    checkpointing: str = "none"
    """`full` runs all of a layer again, `half` every other product and all else, `layers` every other layer."""
    lora_rank: int = 0
    """Of adapters beside every matrix, which alone are trained; 0: all is trained."""
    accumulates: bool = True
    """Gradients are added to those of earlier microbatches."""
    context_parallel: int = 1
    """Devices that share the tokens of each sequence, and of attention's products evenly."""
    data_type: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.sequence * self.microbatch // self.context_parallel


def works_of(model: Decoder, run: Run) -> list[LayerWork]:
    """Return the work of the embedding, of each layer, and of the last norm, the head and the loss."""
    plain = replace(run, checkpointing="none")
    layers = [
        block_of(model, plain if run.checkpointing == "layers" and index % 2 else run) for index in range(model.layers)
    ]
    return [embedding_of(model, run), *layers, head_of(model, run)]


def block_of(model: Decoder, run: Run) -> LayerWork:
    """Return the work of one layer."""
    style, tokens = STYLES[run.style], run.tokens
    width, rotated = model.hidden, model.hidden + model.key_value_width
    moved = [
        BYTES_EACH * tokens * (2 * style.norm[way] * width + style.rotary[way] * rotated)
        + BYTES_EACH * tokens * style.activation[way] * model.feed_forward
        + (2 * BYTES_EACH * tokens * style.dropout[way] * width if run.has_dropout or run.style == "megatron" else 0)
        + attention_bytes(model, run)[way]
        + lora_bytes(model, run)[way]
        for way in (0, 1)
    ]
    forward = [*linear_products(model, run, "forward"), *attention_products(model, run, is_backward=False)]
    backward = [*linear_products(model, run, "input"), *attention_products(model, run, is_backward=True)]
    again, again_bytes, again_kernels = repeated(forward, run)
    kernels = [count + (7 * 4 if run.lora_rank else 0) for count in style.kernels]
    weight = linear_products(model, run, "weight")
    trained = lora_parameters(model, run) if run.lora_rank else model.layer_parameters
    return layer_work(
        "block",
        forward=pass_work(forward, moved[0], kernels[0]),
        backward_input=pass_work([*backward, *again], moved[1] + again_bytes * moved[0], kernels[1] + again_kernels),
        backward_weight=pass_work(weight, accumulated_bytes(trained, run), 0),
        num_parameters=model.layer_parameters + (trained if run.lora_rank else 0),
        trainable_parameters=trained,
        message_bytes=BYTES_EACH * tokens * width,
    )


def repeated(forward: list[Product], run: Run) -> tuple[list[Product], int, int]:
    """Return what a backward runs again: products, whether all else, and the kernels of that."""
    if run.checkpointing in ("full", "layers"):
        return forward, 1, STYLES[run.style].kernels[0]
    if run.checkpointing == "half":
        linears = [product for product in forward if product.kernel == "matmul"]
        return linears[::2], 1, STYLES[run.style].kernels[0]
    return [], 0, 0


def linear_products(model: Decoder, run: Run, kind: str) -> list[Product]:
    """Return the products of a layer's matrices, and of their adapters, in one kind of pass."""
    products = []
    for features_in, features_out in joined(model) if run.style == "megatron" else model.linears:
        if kind != "weight" or not run.lora_rank:
            products.append(linear(run, features_in, features_out, kind))
        if run.lora_rank:
            products.append(linear(run, features_in, run.lora_rank, kind))
            products.append(linear(run, run.lora_rank, features_out, kind))
    return products


def joined(model: Decoder) -> list[tuple[int, int]]:
    """Return features in and out of a layer's matrices where queries, keys and values come of one product."""
    (width, _), (_, narrow), *rest = model.linears[0], model.linears[1], *model.linears[3:]
    return [(width, width + 2 * narrow), *rest]


def linear(run: Run, features_in: int, features_out: int, kind: str) -> Product:
    """Return the product of a matrix with all tokens, or the one that its input's or its own gradient takes."""
    rows, columns, inner = {
        "forward": (run.tokens, features_out, features_in),
        "input": (run.tokens, features_in, features_out),
        "weight": (features_out, features_in, run.tokens),
    }[kind]
    return Product(rows=rows, columns=columns, inner=inner, data_type=run.data_type)


def attention_products(model: Decoder, run: Run, *, is_backward: bool) -> Iterator[Product]:
    """Yield the products of scores and values: two forward; backward four, and the scores again in one kernel."""
    length, features = run.sequence, model.hidden // model.heads
    scores, values = (length, length, features), (length, features, length)
    shapes = [scores, values]
    if is_backward:  # a kernel that has kept no scores computes them again
        shapes = [*([scores] if run.has_flash_attention else []), scores, values, values, values]
    for rows, columns, inner in shapes:
        yield Product(
            rows=rows,
            columns=columns,
            inner=inner,
            batch=run.microbatch * model.heads,
            data_type=run.data_type,
            kernel="attention" if run.has_flash_attention else "matmul",
            computed_share=(0.5 if run.has_flash_attention else 1.0) / run.context_parallel,
        )


def attention_bytes(model: Decoder, run: Run) -> tuple[float, float]:
    """Return the bytes that attention moves beside its products."""
    if run.has_flash_attention:
        return 0.0, BYTES_EACH * run.tokens * 5 * model.hidden  # its sums with the output, and queries' gradients
    scores = BYTES_EACH * run.microbatch * model.heads * run.sequence**2
    # Softmax reads and writes; so does dropout, which has a mask of one byte.
    return scores * (2 + 2.5 * run.has_dropout), scores * (3 + 2.5 * run.has_dropout)


def lora_bytes(model: Decoder, run: Run) -> tuple[float, float]:
    """Return the bytes that sum the results of matrices and of their adapters, and their dropout."""
    if not run.lora_rank:
        return 0.0, 0.0
    width, inner, narrow = model.hidden, model.feed_forward, model.key_value_width
    features_out, features_in = 3 * width + 2 * narrow + 2 * inner, 6 * width + inner
    dropped = 2.5 * features_in * run.has_dropout
    each = BYTES_EACH * run.tokens
    return each * (3 * features_out + dropped), each * (3 * features_in + dropped)


def lora_parameters(model: Decoder, run: Run) -> int:
    return sum(run.lora_rank * (features_in + features_out) for features_in, features_out in model.linears)


def accumulated_bytes(num_parameters: int, run: Run) -> float:
    """Return the bytes that add gradients to those of earlier microbatches: two are read, and one is written.

    Megatron's products do it themselves (`--gradient-accumulation-fusion`, on by default).
    """
    return 3 * BYTES_EACH * num_parameters if run.accumulates and run.style != "megatron" else 0.0


def embedding_of(model: Decoder, run: Run) -> LayerWork:
    """Return the work of looking tokens up."""
    num_parameters = model.vocabulary * model.hidden
    trained = 0 if run.lora_rank else num_parameters
    looked_up = BYTES_EACH * run.tokens * 2 * model.hidden
    return layer_work(
        "embedding",
        forward=pass_work([], looked_up, 2),
        backward_input=PassWork(),
        backward_weight=pass_work([], BYTES_EACH * trained + accumulated_bytes(trained, run), 2),
        num_parameters=num_parameters,
        trainable_parameters=trained,
        message_bytes=BYTES_EACH * run.tokens * model.hidden,
    )


def head_of(model: Decoder, run: Run) -> LayerWork:
    """Return the work of the last norm, the scores of the vocabulary, and the loss."""
    style, num_parameters = STYLES[run.style], model.vocabulary * model.hidden
    trained = 0 if run.lora_rank else num_parameters
    moved = [
        BYTES_EACH * run.tokens * (style.norm[way] * model.hidden + style.loss[way] * model.vocabulary)
        for way in (0, 1)
    ]
    products = {kind: linear(run, model.hidden, model.vocabulary, kind) for kind in ("forward", "input", "weight")}
    return layer_work(
        "head",
        forward=pass_work([products["forward"]], moved[0], 8),
        backward_input=pass_work([products["input"]], moved[1], 8),
        backward_weight=pass_work([products["weight"]] if trained else [], accumulated_bytes(trained, run), 0),
        num_parameters=num_parameters,
        trainable_parameters=trained,
        message_bytes=BYTES_EACH * run.tokens,
    )


def pass_work(products: list[Product], moved_bytes: float, other_kernels: int) -> PassWork:
    """Return the work of a pass, with a kernel for each product; attention's are counted with the others."""
    count = sum(product.kernel == "matmul" for product in products) + other_kernels
    return PassWork(products=tuple(products), moved_bytes=round(moved_bytes), num_kernels=count)


def layer_work(
    name: str,
    *,
    forward: PassWork,
    backward_input: PassWork,
    backward_weight: PassWork,
    num_parameters: int,
    trainable_parameters: int,
    message_bytes: int,
) -> LayerWork:
    """Return work with the bytes of parameters; what is kept does not matter for seconds."""
    return LayerWork(
        name=name,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        num_parameters=num_parameters,
        trainable_parameters=trainable_parameters,
        parameter_bytes=BYTES_EACH * num_parameters,
        gradient_bytes=BYTES_EACH * trainable_parameters,
        activation_bytes=0,
        weight_context_bytes=0,
        message_bytes=message_bytes,
        checkpoint_bytes=0,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
    )
