"""The work of GPT-OSS for one device of a run with expert parallelism, written down by hand; its exchanges are not."""

from dataclasses import dataclass

from decoder_work import BYTES_EACH, FUSED, accumulated_bytes, layer_work, pass_work

from penstock.simulation.costs.layer_work import LayerWork, Product, ProductKernel

HIDDEN, QUERIES, KEYS, HEAD_WIDTH, VOCABULARY = 2880, 4096, 512, 64, 201_088
NUM_ACTIVE, WINDOW = 4, 128
"""Experts of each token; tokens that every other layer attends to."""


@dataclass(frozen=True, kw_only=True)
class ExpertRun:
    """A run of GPT-OSS, whose tokens are spread evenly over experts."""

    layers: int
    experts: int
    devices: int
    """That share out the experts."""
    microbatch: int
    sequence: int = 4096
    accumulates: bool = True
    style: str = "fused"

    @property
    def tokens(self) -> int:
        return self.microbatch * self.sequence


def expert_works(run: ExpertRun) -> list[LayerWork]:
    """Return the work of all layers and of the head."""
    return [*(_block(run, is_windowed=index % 2 == 0) for index in range(run.layers)), _head(run)]


def _block(run: ExpertRun, *, is_windowed: bool) -> LayerWork:
    tokens, local = run.tokens, run.experts // run.devices
    rows = tokens * NUM_ACTIVE // local  # as many tokens come from other devices as go to them
    dense = [(tokens, *shape) for shape in ((HIDDEN, QUERIES), (HIDDEN, KEYS), (HIDDEN, KEYS), (QUERIES, HIDDEN))]
    grouped = [(rows, HIDDEN, 2 * HIDDEN), (rows, HIDDEN, HIDDEN)]
    parameters = sum(width * out for _, width, out in dense) + local * sum(width * out for _, width, out in grouped)
    kinds: dict[str, list[Product]] = {}
    for kind, order in {"forward": (0, 2, 1), "input": (0, 1, 2), "weight": (2, 1, 0)}.items():
        parts: list[tuple[list[tuple[int, int, int]], int, ProductKernel]] = [
            (dense, 1, "matmul"),
            (grouped, local, "grouped"),
        ]
        kinds[kind] = [
            _product([shape[index] for index in order], batch, kernel)
            for part, batch, kernel in parts
            for shape in part
        ]
    share = WINDOW / run.sequence if is_windowed else 0.5
    scores = _product(
        [run.sequence, run.sequence, HEAD_WIDTH], run.microbatch * QUERIES // HEAD_WIDTH, "attention", share
    )
    moved = [
        BYTES_EACH * tokens * (2 * FUSED.norm[way] * HIDDEN + FUSED.rotary[way] * (QUERIES + KEYS))
        + BYTES_EACH * tokens * NUM_ACTIVE * HIDDEN * (FUSED.activation[way] + 4)  # sorted by expert, and back
        for way in (0, 1)
    ]
    return layer_work(
        "block",
        forward=pass_work([*kinds["forward"], scores, scores], moved[0], 25),
        backward_input=pass_work([*kinds["input"], *[scores] * 5], moved[1], 30),
        backward_weight=pass_work(kinds["weight"], accumulated_bytes(parameters, run), 2),
        num_parameters=parameters,
        trainable_parameters=parameters,
        message_bytes=BYTES_EACH * tokens * HIDDEN,
    )


def _head(run: ExpertRun) -> LayerWork:
    moved = [BYTES_EACH * run.tokens * FUSED.loss[way] * VOCABULARY for way in (0, 1)]
    parameters = VOCABULARY * HIDDEN
    return layer_work(
        "head",
        forward=pass_work([_product([run.tokens, VOCABULARY, HIDDEN])], moved[0], 8),
        backward_input=pass_work([_product([run.tokens, HIDDEN, VOCABULARY])], moved[1], 8),
        backward_weight=pass_work([_product([VOCABULARY, HIDDEN, run.tokens])], accumulated_bytes(parameters, run), 0),
        num_parameters=parameters,
        trainable_parameters=parameters,
        message_bytes=BYTES_EACH * run.tokens,
    )


def _product(shape: list[int], batch: int = 1, kernel: ProductKernel = "matmul", share: float = 1.0) -> Product:
    rows, columns, inner = shape
    return Product(
        rows=rows,
        columns=columns,
        inner=inner,
        batch=batch,
        data_type="bfloat16",
        kernel=kernel,
        computed_share=share,
    )
