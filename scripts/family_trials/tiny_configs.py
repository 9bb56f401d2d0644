"""Tiny configs of families of transformers: every size of a config is made small by its name, whatever the family."""

from typing import Any

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "n_hidden"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "attention_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "swa_head_dim", "global_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "swa_v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "rotary_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "inner_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size"), 16),
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("original_max_position_embeddings",), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "sliding_window", "attention_window_size", "index_topk"), 4),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("lru_width", "word_embed_proj_dim", "mamba_d_ssm", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 4),
}
"""Sizes by the names that configs have for them."""
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
IMAGE_TOKENS = ("image_token_id", "image_token_index")
IMAGE_TOKEN = 95
ENDED = ("_dropout", "dropout", "_drop", "_pdrop", "layerdrop", "dropout_rate", "drop_path_rate", "dropout_prob")
"""Endings of names of rates of dropout, which are 0 here, so that gradients can be compared."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 12, "linear_num_heads": 4, "num_expert_group": 1},
    "bamba": MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "esm": {"vocab_size": 96},
    "fsmt": {"src_vocab_size": 96, "tgt_vocab_size": 96},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": [0.0] * 4, "num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "internvl": {"vision_config": {"image_size": (16, 16), "patch_size": (4, 4)}},
    "kimi_linear": {"linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"ffn_hidden_size": 48, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 4},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 32}, "text_config": MROPE},
    "qwen3_vl": {
        "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        "text_config": MROPE,
    },
    "roc_bert": {
        "shape_vocab_size": 96,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": 96,
        "pronunciation_embed_dim": 8,
    },
    "switch_transformers": {"router_jitter_noise": 0.0},
    "xlnet": {"d_inner": 48, "n_head": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that stubborn families need beside the sizes."""


def settings_of(config_class: Any, *, is_causal: bool = False, **more: Any) -> dict[str, Any]:
    """Return the arguments that make a tiny config of a class, of which `more` come before the rules."""
    default = config_class()
    settings: dict[str, Any] = {}
    for name, value in vars(default).items():
        sub_class = getattr(type(value), "model_type", None)
        if name.startswith("_") or (name in more and sub_class is None):
            continue
        if sub_class is not None:
            settings[name] = settings_of(type(value), **more.pop(name, {}))
        elif name in SIZES and (isinstance(value, int) or value is None) and not isinstance(value, bool):
            settings[name] = SIZES[name] if value is not None else None
        elif name in IMAGE_TOKENS and value is not None:
            settings[name] = IMAGE_TOKEN
        elif name in TOKEN_IDS:
            settings[name] = TOKEN_IDS[name]
        elif isinstance(value, float) and name.endswith(ENDED):
            settings[name] = 0.0
    # Without groups of heads, each head has its own key and value.
    values = vars(default)
    for groups in ("num_key_value_heads", "num_kv_heads"):
        if groups in values and values[groups] == values.get("num_attention_heads"):
            settings[groups] = settings.get("num_attention_heads")
    if "is_decoder" in values and is_causal:
        settings["is_decoder"] = True
    return {name: value for name, value in settings.items() if value is not None} | more
