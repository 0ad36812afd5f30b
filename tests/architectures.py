"""Small models with random weights of the architectures that people run, made of transformers' configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 128},
    **{"max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "embedding_size": 32},
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PAIR = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 64,
    },
}
_STAGES = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "embedding_size": 16, "groups_width": 8}

ENCODERS = ("bert", "roberta", "albert", "electra", "mpnet", "distilbert", "deberta-v2")
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gpt2", "gpt_neox", "opt", "falcon", "mamba")},
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "cohere", "olmo2", "stablelm"), _GROUPED
    ),
    **dict.fromkeys(("qwen3_moe", "gpt_oss", "llama4_text"), _EXPERTS),
}
PAIRS = ("t5", "bart", "marian")
VISION: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (32, {"image_size": 32, "patch_size": 8}) for name in ("vit", "deit", "beit")},
    **dict.fromkeys(("resnet", "convnext", "regnet"), (64, _STAGES)),
    "segformer": (64, _STAGES | {"num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 32}),
    "swin": (64, {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
}
SPEECH, BOTH = "whisper", "clip"
ALL = (*ENCODERS, *DECODERS, *PAIRS, *VISION, SPEECH, BOTH)


def make(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of an architecture, in evaluation mode, with keyword arguments to call it with."""
    ids = torch.randint(5, 120, (2, 16))
    if name in VISION:
        size, changes = VISION[name]
        config = _config(name, changes if "depths" in changes else {**_SIZES, **changes})
        return transformers.AutoModel.from_config(config).eval(), {"pixel_values": torch.randn(2, 3, size, size)}
    if name in PAIRS:
        model = transformers.AutoModelForSeq2SeqLM.from_config(_config(name, {**_SIZES, **_PAIR}))
        return model.eval(), {"input_ids": ids, "decoder_input_ids": ids}
    if name == SPEECH:
        sizes = {**_SIZES, **_PAIR, "max_source_positions": 30, "max_target_positions": 32, "decoder_start_token_id": 2}
        sizes |= {"suppress_tokens": None, "begin_suppress_tokens": None, "bos_token_id": 1, "eos_token_id": 2}
        model = transformers.WhisperForConditionalGeneration(_config(name, sizes))
        return model.eval(), {"input_features": torch.randn(1, 80, 60), "decoder_input_ids": ids[:1, :8]}
    if name == BOTH:
        vision = {**_SIZES, "image_size": 32, "patch_size": 8}
        text = {**_SIZES, "bos_token_id": 1, "eos_token_id": 2}
        config = _config(name, {"projection_dim": 16, "text_config": text, "vision_config": vision})
        return transformers.CLIPModel(config).eval(), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    if name in DECODERS:
        model = transformers.AutoModelForCausalLM.from_config(_config(name, {**_SIZES, **DECODERS[name]}))
        return model.eval(), {"input_ids": ids}
    model = transformers.AutoModel.from_config(_config(name, _SIZES))
    return model.eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _config(name: str, sizes: dict[str, Any]) -> Any:
    kind = transformers.CONFIG_MAPPING[name]
    known = {*kind().to_dict(), *kind.attribute_map}
    return kind(**{key: value for key, value in sizes.items() if key in known})
