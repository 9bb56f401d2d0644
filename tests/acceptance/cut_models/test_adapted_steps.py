"""Adapters, losses in chunks, numbers of microbatches, shards and scalers together have the numbers of plain training.

In float64 on a GPT-2, none of whose operators goes to float32 on the way, so that 1e-12 tells a wrong gradient.
"""

from functools import partial

import pytest
import torch
from torch.amp import GradScaler
from torch.nn import functional

import penstock as ps
from penstock.ir.schedule import Schedule
from tests.hugging_face.families import batch_of
from tests.support.mesh_pipelines import on_mesh, put_together, rows_of

peft = pytest.importorskip("peft")

from tests.hugging_face.adapted import LORA, PREFIX, saved_base, settle  # noqa: E402

CLOSE = 1e-12
TOKENS, LABELS, _ = batch_of("plain")
CONV = {**LORA, "fan_in_fan_out": True}
KINDS = {
    None: None,
    "LoRA": {**CONV, "target_modules": ["c_attn", "c_proj"]},
    "last layers": {**CONV, "target_modules": ["c_attn"], "layers_to_transform": [4, 5], "layers_pattern": "h"},
    "DoRA on the head": {**LORA, "target_modules": ["lm_head"], "use_dora": True},
    "a trained head": {**CONV, "target_modules": ["c_attn", "wte"], "modules_to_save": ["lm_head"]},
}


def sum_of(log_probs, target):
    return ps.LossOutput(-log_probs.sum(), (target[:, 1:] != -100).sum(), reported=log_probs)


LOSSES = {
    "chunked": lambda layers: partial(ps.losses.chunked_cross_entropy, chunk=4),
    "log_probs": lambda layers: layers.log_probs(sum_of, chunk=5),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base"), "gpt2", tie_word_embeddings=False)


def layers_of(base, kind):
    config = None if kind is None else peft.LoraConfig(**KINDS[kind])
    return ps.from_transformers(base, dtype=torch.float64, adapter=config)


def plain(base, kind, weights):
    """Return loss and gradients of one process that takes the whole batch at once."""
    from transformers import AutoModelForCausalLM

    model, prefix = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), ""
    if kind is not None:
        model, prefix = peft.get_peft_model(model, peft.LoraConfig(**KINDS[kind])), PREFIX
    assert not model.load_state_dict({prefix + name: value for name, value in weights.items()}, strict=False)[1]
    logits = model.train()(TOKENS, use_cache=False).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), LABELS[:, 1:].flatten())
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name.removeprefix(prefix): each.grad for name, each in named if each.grad is not None}


class Rank:
    """What one rank has after a step."""

    def __init__(self, pipeline, result, scale):
        named = list(pipeline.named_parameters())
        self.loss = result.loss.item()
        self.weights = {name: rows_of(each) for name, each in named}
        self.gradients = {name: rows_of(each.grad / scale) for name, each in named if each.grad is not None}


def assert_plain(base, kind, loss, schedule, numbers, *, ranks=2, replicas=1, scaler=None, **options):
    """Compare a step of each of these numbers of microbatches of a replica, on one pipeline, with one process."""
    layers_by_replica = [layers_of(base, kind) for _ in range(replicas)]

    def steps(place):
        layers = layers_by_replica[place.replica]
        own_scaler = None if scaler is None else scaler()
        scale = {} if scaler is None else {"scale_loss": own_scaler.scale}
        number = None if isinstance(schedule, Schedule | ps.Program) else 4
        arguments = {"count": layers.count, "allow_ragged": True, **scale, **options}
        with ps.Pipeline(layers, schedule, number, LOSSES[loss](layers), mesh=place, **arguments) as pipeline:
            if replicas == 1:
                settle(pipeline.named_parameters())
            results = []
            for number in numbers:
                for parameter in pipeline.parameters():
                    parameter.grad = None
                rows = slice(
                    pipeline.replica * len(TOKENS) // replicas, (pipeline.replica + 1) * len(TOKENS) // replicas
                )
                result = pipeline.step(TOKENS[rows], target=LABELS[rows], microbatches=number)
                results.append(Rank(pipeline, result, 1.0 if own_scaler is None else own_scaler.get_scale()))
            return results

    wanted = None
    for ranks_of_step in zip(*on_mesh(ranks, replicas, steps, deadline_s=60.0), strict=True):
        put_together(ranks_of_step, replicas)
        gradients = {name: value for rank in ranks_of_step for name, value in rank.gradients.items()}
        wanted = wanted or plain(base, kind, {name: v for rank in ranks_of_step for name, v in rank.weights.items()})
        largest = max(gradient.abs().max() for gradient in wanted[1].values())
        assert gradients.keys() == wanted[1].keys()
        assert max((gradients[name] - value).abs().max() / largest for name, value in wanted[1].items()) < CLOSE
        assert [rank.loss for rank in ranks_of_step] == pytest.approx([wanted[0]] * len(ranks_of_step), rel=CLOSE)


@pytest.mark.feature("X60")
@pytest.mark.parametrize(
    ("kind", "loss", "schedule"),
    [
        ("LoRA", "chunked", "1f1b"),
        *(
            pytest.param(kind, loss, schedule, marks=pytest.mark.slow)
            for kind in KINDS
            for loss, schedule in (("chunked", "interleaved-1f1b"), ("log_probs", "zbv"))
        ),
    ],
)
def test_other_numbers_of_microbatches(base, kind, loss, schedule):
    assert_plain(base, kind, loss, schedule, (4, 3, 8) if schedule == "zbv" else (3, 8, 1, 5))


@pytest.mark.parametrize(
    ("kind", "loss", "schedule", "shard"),
    [
        ("a trained head", "chunked", "1f1b", "full"),
        *(
            pytest.param(kind, loss, schedule, shard, marks=pytest.mark.slow)
            for kind in KINDS
            for loss, schedule, shard in (
                ("log_probs", "1f1b", "full"),
                ("chunked", "1f1b", "optimizer"),
                ("log_probs", "zbv", "none"),
            )
        ),
    ],
)
def test_replicas_and_shards(base, kind, loss, schedule, shard):
    assert_plain(base, kind, loss, schedule, (4, 3) if schedule == "zbv" else (4, 3, 1), replicas=2, shard=shard)


@pytest.mark.parametrize("number", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["a trained head", pytest.param("last layers", marks=pytest.mark.slow)])
def test_a_grad_scaler(base, kind, number):
    scaler = partial(GradScaler, "cpu", init_scale=2.0**10)
    assert_plain(base, kind, "chunked", "1f1b", (number, 3, 8), scaler=scaler)


PROGRAMS = [
    pytest.param(family, options, marks=() if index == 0 else pytest.mark.slow, id=f"{family} {' '.join(options)}")
    for index, (family, options) in enumerate(
        (family, dict.fromkeys(names, True))
        for family in ("1f1b", "zb-h1", "interleaved-1f1b")
        for names in (("barriers", "loads"), ("barriers",), ("loads",))
    )
]


@pytest.mark.parametrize(("family", "options"), PROGRAMS)
def test_rounds_of_a_program_with_rows_for_barriers_and_loads(base, family, options):
    program = ps.lower(ps.build(family, ranks=2, microbatches=4), **options)

    assert_plain(base, "last layers", "chunked", program, (3, 8, 6, 1))
