"""Tensor names of older and re-saved checkpoints, brought to the official ones by the official converter's rules.

Source: spec §4.3. Names that the rules do not cover stay as they are, so that verification can name them.
"""

from __future__ import annotations

_PARTS = {
    "self_attn": "attn",
    "mlp": "ffn",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
    "embed_tokens": "embed",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_layernorm": "kv_norm",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lm_head": "head",
}


def official_name(name: str) -> str | None:
    """The official name of ``name``, or None for a draft block's copy of the embedding or head (shared, not loaded)."""
    name = name.removeprefix("model.")
    if name.startswith("mtp.") and ("emb" in name or name.endswith("head.weight")):
        return None
    return ".".join(_PARTS.get(part, part) for part in name.split("."))
