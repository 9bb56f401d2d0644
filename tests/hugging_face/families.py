"""Tiny configs of families of causal language models, with batches, and gradients of one process."""

import torch

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
SLIDING = {"sliding_window": 4}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

CONFIGS = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, **SLIDING}),
    "qwen2": ("Qwen2Config", {**GROUPED, **SLIDING, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma": ("GemmaConfig", HEADS),
    "gemma2": ("Gemma2Config", {**HEADS, **SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **SLIDING, "query_pre_attn_scalar": 8}),
    "phi": ("PhiConfig", GROUPED),
    "phi3": ("Phi3Config", GROUPED),
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "olmo": ("OlmoConfig", GROUPED),
    "olmo2": ("Olmo2Config", GROUPED),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "gpt2": ("GPT2Config", {**GPT2, **UNDROPPED}),
}
FAMILIES = tuple(CONFIGS)
BATCHES = ("plain", "padded", "packed")
NUM_MICROBATCHES, ROWS, LENGTH = 4, 8, 12


def config_of(family, **changes):
    import transformers

    name, settings = CONFIGS[family]
    return getattr(transformers, name)(**{**settings, **changes})


def model_of(family, attention="sdpa", **changes):
    """Return a model with random values; Gemma 2 has no attention but eager."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation=attention)


def batch_of(kind):
    """Return input_ids, labels and the keywords of a batch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:2, :4] = -100
    if kind == "padded":
        mask = torch.ones_like(tokens)
        for row in range(ROWS):
            mask[row, LENGTH - row % 4 :] = 0
        labels[mask == 0] = -100
        return tokens, labels, {"attention_mask": mask}
    if kind == "packed":
        places = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
        return tokens, labels, {"position_ids": places.repeat(ROWS, 1)}
    return tokens, labels, {}


def accumulated(model, tokens, labels, keywords, loss_of=lambda output: output.loss):
    """Return loss and gradients of the model itself, one microbatch after another, without a cache."""
    model.zero_grad()
    model.train()
    number = (labels[:, 1:] != -100).sum()
    size = ROWS // NUM_MICROBATCHES
    total = 0.0
    for begin in range(0, ROWS, size):
        rows = slice(begin, begin + size)
        own = {name: value[rows] for name, value in keywords.items()}
        given = {"input_ids": tokens[rows], "labels": labels[rows], "num_items_in_batch": number}
        loss = loss_of(model(**given, **own, use_cache=False))
        loss.backward()
        total += loss.item()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return total, gradients


def furthest(found, wanted, ties):
    """Return the largest difference of gradients or weights, as a share of the largest one."""
    largest = max(gradient.abs().max() for gradient in wanted.values())
    owners = {name: wanted[name if name in wanted else ties[name]] for name in found}
    return max(((found[name] - owners[name]).abs().max() / largest).item() for name in found)
