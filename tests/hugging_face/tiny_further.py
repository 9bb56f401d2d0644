"""Tiny models of further families, with batches: encoders with decoders or heads, and vision with language."""

import torch

import penstock as ps

ROWS, LENGTH, NUM_MICROBATCHES = 4, 12, 2
VOCABULARY, IMAGE = 64, 60
"""Tokens below 60 are words; those from 60 on stand for images and their begin and end."""
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STACKS = {
    **{"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0},
    **{"decoder_start_token_id": 2, **WORDS},
}
T5 = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "vocab_size": VOCABULARY},
}
TEXT_ENCODER = {**WORDS, **SHAPE, **UNDROPPED, "max_position_embeddings": 64, "num_labels": 3}
IMAGES = {**SHAPE, **UNDROPPED, "image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}
VISION = {**SHAPE, "image_size": 8, "patch_size": 2, "num_channels": 3}
QWEN_VISION = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 2, "in_channels": 3},
    **{"temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 32},
}
LLAMA = {**WORDS, **SHAPE, **HEADS}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN = {**LLAMA, "rope_parameters": ROTARY}
MARKS = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE + 1, "vision_end_token_id": IMAGE + 2}
HEADED_LLAMA = {**LLAMA, "num_labels": 3, "classifier_dropout": 0.0}

SEQ2SEQ = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", STACKS),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", STACKS),
    "marian": ("MarianMTModel", "MarianConfig", STACKS),
}
MASKED = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT_ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT_ENCODER),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**TEXT_ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "bert-tokens": ("BertForTokenClassification", "BertConfig", TEXT_ENCODER),
    "llama-tokens": (
        "LlamaForTokenClassification",
        "LlamaConfig",
        HEADED_LLAMA,
    ),
}
CLASSIFIERS = {
    "bert-rows": ("BertForSequenceClassification", "BertConfig", TEXT_ENCODER),
    "llama-rows": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        HEADED_LLAMA,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGES),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGES),
    "siglip": ("SiglipForImageClassification", "SiglipConfig", {"vision_config": IMAGES, "num_labels": 3}),
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
DECODERS = {
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **{**LLAMA, **EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8},
            **{"o_groups": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "hc_mult": 2},
            **{"sliding_window": 4, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **{**LLAMA, "sliding_window": 4, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {
            **{**LLAMA, **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
            **{"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2, "head_dim": 4},
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **{**WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
            **{"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "intermediate_size": 48},
            **{"n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 8, "num_logits_to_keep": 0},
            **{"hybrid_layer_ids": [1, 3]},
        },
    ),
}


def _seen(text, vision, **further):
    return {"text_config": text, "vision_config": vision, "image_token_id": IMAGE, **further}


VISION_LANGUAGE = {
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        _seen(
            {"model_type": "llama", **LLAMA},
            {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
            **{"image_token_index": IMAGE, "vision_feature_layer": -1},
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        _seen({**LLAMA, "sliding_window": 4, "query_pre_attn_scalar": 8}, VISION, **{"mm_tokens_per_image": 4}),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        _seen(QWEN, {**QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [1, 3]}, **MARKS),
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        _seen(QWEN, {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 2]}, **MARKS),
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        _seen({"model_type": "llama", **LLAMA}, VISION, **{"scale_factor": 2}),
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        _seen(
            {"model_type": "qwen2", **LLAMA},
            {**VISION, "image_size": [8, 8], "patch_size": [2, 2]},
            **{"downsample_ratio": 0.5},
        ),
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        _seen(
            {"model_type": "gemma", **LLAMA},
            {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32, "vision_use_head": False},
            **{"projection_dim": 32},
        ),
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        _seen(
            {"model_type": "mistral", **LLAMA},
            {"model_type": "pixtral", **VISION, "head_dim": 8},
            **{"spatial_merge_size": 2, "vision_feature_layer": -1},
        ),
    ),
}
NUM_IMAGE_TOKENS = {"llava": 16, "paligemma": 16}
"""Tokens of an image by family; 4 where it is none of these."""
ALL = SEQ2SEQ | MASKED | CLASSIFIERS | DECODERS | VISION_LANGUAGE


def config_of(name, **changes):
    import transformers

    model_class, config_class, settings = ALL[name]
    return getattr(transformers, config_class)(**{**settings, **changes}, architectures=[model_class])


def model_of(name, **changes):
    """Return a model whose weights are large enough for gradients that differ."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, ALL[name][0])(config_of(name, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # not fixed positions
                parameter.normal_(0, 0.15, generator=generator)
    return model


def batch_of(name):
    """Return a batch by the names of the forward's arguments, and labels."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, high=60):
        return torch.randint(3, high, shape, generator=generator)

    if name in ("vit", "dinov2", "siglip"):
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator)}, torch.tensor([0, 2, 1, 1])
    tokens, mask = draw(ROWS, LENGTH), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    if name in VISION_LANGUAGE:
        return _image_batch(name, draw, generator)
    mask[1, 9:], mask[2, 5:] = 0, 0
    tokens[mask == 0] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name in SEQ2SEQ:
        return {**batch, "decoder_input_ids": draw(ROWS, 7)}, _some_ignored(draw(ROWS, 7))
    if name in CLASSIFIERS:
        return batch, torch.tensor([0, 2, 1, 1])
    labels = _some_ignored(draw(ROWS, LENGTH, high=6) - 3 if name.endswith("tokens") else draw(ROWS, LENGTH))
    return batch, labels


def _some_ignored(labels):
    labels[0, :2], labels[3, 4:] = -100, -100
    return labels


def _image_batch(name, draw, generator):
    number = NUM_IMAGE_TOKENS.get(name, 4)
    image = torch.full((ROWS, number), IMAGE)
    if name.startswith("qwen"):
        image = torch.cat([image[:, :1] + 1, image, image[:, :1] + 2], 1)
    tokens = torch.cat([draw(ROWS, 3), image, draw(ROWS, 6)], 1)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name.startswith("qwen"):
        batch["pixel_values"] = torch.randn(ROWS * 16, 12, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * ROWS)
        batch["mm_token_type_ids"] = (tokens == IMAGE).long()
    else:
        batch["pixel_values"] = torch.randn(ROWS, 3, 8, 8, generator=generator)
    if name == "smolvlm":
        batch["pixel_values"] = batch["pixel_values"][:, None]
    if name == "mistral3":
        batch["image_sizes"] = torch.tensor([[8, 8]] * ROWS)
    if name in ("gemma3", "paligemma"):
        batch["token_type_ids"] = (tokens == IMAGE).long()
    labels = tokens.clone()
    labels[tokens >= IMAGE] = -100
    return batch, labels


def microbatches(name, batch, labels):
    """Return the batch and the labels of each microbatch, and the share of labels that are in it."""
    is_shifted = name in DECODERS or name in VISION_LANGUAGE
    counted = (labels[:, 1:] if is_shifted else labels) != -100
    size = ROWS // NUM_MICROBATCHES
    parts = []
    for index in range(NUM_MICROBATCHES):
        rows = slice(index * size, (index + 1) * size)
        cut = {key: value.chunk(NUM_MICROBATCHES)[index] for key, value in batch.items()}
        parts.append((cut, labels[rows], counted[rows].sum() / counted.sum()))
    return parts


def split_batch(name, batch):
    """Return a batch as a pipeline takes it, and how it is split: patches of a varying number per row come split."""
    if not name.startswith("qwen"):
        return batch, None
    pixels = ps.PreSplit(batch["pixel_values"].chunk(NUM_MICROBATCHES))
    return {**batch, "pixel_values": pixels}, ps.BatchSpec(kwargs={"pixel_values": ps.Replicate()})


def reference(model, name, batch, labels):
    """Return the loss and gradients of the model itself, which computes its loss of labels."""
    model.zero_grad()
    model.train()
    total = 0.0
    for cut, cut_labels, share in microbatches(name, batch, labels):
        loss = model(**cut, labels=cut_labels).loss * share
        loss.backward()
        total += loss.item()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return total, gradients
