"""The parts that most decoder families share."""

from __future__ import annotations

from typing import Literal

from caudal.graph.program import Builder, Value
from caudal.models.config import ModelConfig


def attention(b: Builder, c: ModelConfig, x: Value, *, qk_norm: Literal["", "head"] = "", window: int = 0) -> Value:
    """Self-attention with rotary positions and grouped queries. qk_norm: RMS norm of each head of q and k."""
    q = b.linear(x, "attn_q", c.n_heads * c.head_dim)
    k = b.linear(x, "attn_k", c.n_kv_heads * c.head_dim)
    v = b.linear(x, "attn_v", c.n_kv_heads * c.v_head_dim)
    if qk_norm == "head":
        q = b.rms_norm(q, "attn_q_norm", c.norm_eps, head_dim=c.head_dim)
        k = b.rms_norm(k, "attn_k_norm", c.norm_eps, head_dim=c.head_dim)
    inv_freq, mscale = c.rope.inv_freq(), c.rope.mscale()
    q = b.rope(q, c.head_dim, inv_freq, c.rope.style, mscale=mscale)
    k = b.rope(k, c.head_dim, inv_freq, c.rope.style, mscale=mscale)
    y = b.attention(q, k, v, head_dim=c.head_dim, v_head_dim=c.v_head_dim, scale=c.head_dim**-0.5, window=window)
    return b.linear(y, "attn_output", c.d_model)


def feed_forward(b: Builder, c: ModelConfig, x: Value, *, act: str = "silu") -> Value:
    """The gated feed-forward of Shazeer (2020)."""
    gate, up = b.linear(x, "ffn_gate", c.d_ff), b.linear(x, "ffn_up", c.d_ff)
    return b.linear(b.glu(gate, up, act), "ffn_down", c.d_model)


def head(b: Builder, c: ModelConfig, x: Value) -> Value:
    """Final norm and logits; without an output matrix of its own the model uses the embedding."""
    x = b.rms_norm(b.last_tokens(x), "output_norm", c.norm_eps)
    return b.linear(x, "output" if b.has("output") else "token_embd", c.vocab_size)
