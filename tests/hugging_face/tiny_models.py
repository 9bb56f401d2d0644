"""Tiny random transformers models, saved as users have them: one family that ties, one that converts, and so on."""

from dataclasses import dataclass

import torch

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1}
CONFIGS = {
    "llama": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 12}),
    "gemma2": ("Gemma2Config", {**LLAMA, "head_dim": 8}),
    "hrm": ("HrmTextConfig", {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8}),
}
FAMILIES = ["llama", "llama-tied", "gpt2", "mixtral", "gemma2"]


@dataclass
class Saved:
    """A model with values, the folder that it is saved in, and the same model without values."""

    model: torch.nn.Module
    folder: object
    empty: torch.nn.Module

    @property
    def state(self):
        return self.model.state_dict()


def config_of(family, **options):
    import transformers

    name, values = CONFIGS[family]
    return getattr(transformers, name)(**values | options)


def empty_model(config):
    """Return a model without values."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def saved_model(family, folder, *, shard_bytes=10**9, dtype=torch.float32, **options):
    """Make a model of random values, and save it with transformers in files of so many bytes."""
    from transformers import AutoModelForCausalLM

    config = config_of(family, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for value in model.state_dict().values():  # no two tensors are equal, as two norms of ones would be
            value.copy_(torch.randn(value.shape))
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return Saved(model, folder, empty_model(config))
