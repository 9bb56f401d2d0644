"""Tiny models with adapters of peft: each kind, what a pipeline makes of it, and what peft does in one process."""

import copy
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import penstock as ps
from tests.hugging_face.families import NUM_MICROBATCHES, ROWS, batch_of, model_of
from tests.support.local_pipelines import on_ranks

peft = pytest.importorskip("peft")

TOKENS, LABELS, _ = batch_of("plain")
LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
QV = ["q_proj", "v_proj"]
KINDS = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "all linear": lambda: peft.LoraConfig(**LORA, target_modules="all-linear"),
    "last layers": lambda: peft.LoraConfig(**LORA, target_modules=QV, layers_to_transform=[4, 5]),
    "a pattern": lambda: peft.LoraConfig(**LORA, target_modules=r".*layers\.[35]\..*(q|v)_proj"),
    "ranks by layer": lambda: peft.LoraConfig(
        **LORA, target_modules=QV, rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 3}
    ),
    "biases": lambda: peft.LoraConfig(**LORA, target_modules=QV, bias="lora_only"),
    "DoRA": lambda: peft.LoraConfig(**LORA, target_modules=QV, use_dora=True),
    "rsLoRA": lambda: peft.LoraConfig(**LORA, target_modules=QV, use_rslora=True),
    "PiSSA": lambda: peft.LoraConfig(**LORA, target_modules=QV, init_lora_weights="pissa"),
    "OLoRA": lambda: peft.LoraConfig(**LORA, target_modules=QV, init_lora_weights="olora"),
    "embeddings": lambda: peft.LoraConfig(**LORA, target_modules=["embed_tokens", "o_proj"]),
    "head": lambda: peft.LoraConfig(**LORA, target_modules=["q_proj", "lm_head"]),
    "a trained head": lambda: peft.LoraConfig(**LORA, target_modules=QV, modules_to_save=["lm_head", "norm"]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "VeRA": lambda: peft.VeraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]),
    "VeRA and a trained head": lambda: peft.VeraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
    "VeRA by seed": lambda: peft.VeraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], save_projection=False
    ),
}
"""The kinds of adapters that train in a pipeline."""
PREFIX = "base_model.model."


def saved_base(folder, family="llama", **changes):
    """Save a tiny model of a family; return the folder as text, as users name it."""
    model_of(family, **changes).save_pretrained(folder)
    return str(folder)


def loaded_base(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder, kind):
    """Return what peft makes of a saved model and a kind of adapter, with its first values."""
    torch.manual_seed(1)
    return peft.get_peft_model(loaded_base(folder), KINDS[kind]())


def settle(named_parameters):
    """Move the trained parameters by numbers that depend on their names, so that no product with them is 0."""
    with torch.no_grad():
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix(PREFIX).encode()))
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@dataclass
class Trained:
    """One rank's results of a step."""

    loss: float
    weights: dict[str, Any]
    gradients: dict[str, Any]


def pipeline_of(layers, transport, schedule="1f1b", **options):
    where = {"ranks": 1} if transport is None else {"transport": transport}
    where = where if "mesh" not in options else {}
    options = {"microbatches": NUM_MICROBATCHES, "loss": layers.loss, **options}
    return ps.Pipeline(layers, schedule, count=layers.count, **where, **options)


def trained_on(layers, ranks, schedule="1f1b", **options):
    """Return, per rank, what a step of these layers gives, from settled adapters."""

    def step(transport):
        with pipeline_of(layers, transport if ranks > 1 else None, schedule, **options) as pipeline:
            settle(pipeline.named_parameters())
            weights = {name: each.detach().clone() for name, each in pipeline.state_dict().items()}
            loss = pipeline.step(TOKENS, target=LABELS).loss.item()
            gradients = {name: each.grad for name, each in pipeline.named_parameters() if each.grad is not None}
            return Trained(loss, weights, gradients)

    return on_ranks(ranks, step)


def trained_by_peft(model, *, settled=True):
    """Return what one process has of the same microbatches."""
    if settled:
        settle(model.named_parameters())
    model.train()
    number, size, total = (LABELS[:, 1:] != -100).sum(), ROWS // NUM_MICROBATCHES, 0.0
    for begin in range(0, ROWS, size):
        rows = {"input_ids": TOKENS[begin : begin + size], "labels": LABELS[begin : begin + size]}
        loss = model(**rows, num_items_in_batch=number, use_cache=False).loss
        loss.backward()
        total += loss.item()
    gradients = {
        name.removeprefix(PREFIX): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Trained(total, {}, gradients)


def joined(results, field):
    """Return one field of all ranks."""
    return {name: value for result in results for name, value in getattr(result, field).items()}


def with_weights(model, weights):
    """Give a model of peft the weights of a pipeline, but for first values that both must make alike."""
    model = copy.deepcopy(model)
    strange = model.load_state_dict({PREFIX + name: value for name, value in weights.items()}, strict=False)
    assert not strange.unexpected_keys
    assert all("vera_" in name for name in strange.missing_keys)  # beside the layers' own
    return model


def tier(kind, ranks, quick_kinds):
    """Return the marks of a test: each kind runs on 2 ranks, some on others too, and all on all in a full run."""
    if ranks == 2:
        return () if kind in quick_kinds else pytest.mark.slow
    return pytest.mark.slow if kind in quick_kinds else pytest.mark.full
