"""Llama (Touvron et al. 2023) and the dense families that differ from it in details: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from caudal.graph.program import Builder, Value
from caudal.models import architecture
from caudal.models.blocks import attention, feed_forward, head
from caudal.models.config import ModelConfig

_LLAMA = ("llama", "mistral")


@architecture(*_LLAMA, "qwen2", "qwen3", norm_rope=_LLAMA)
def build(b: Builder, c: ModelConfig) -> Value:
    # Qwen files may state a window though the released models attend to everything.
    window = c.window if c.arch in _LLAMA else 0
    x = b.embed("token_embd", c.d_model)
    for i in range(c.n_layers):
        with b.layer(i):
            qk_norm = "head" if b.has("attn_q_norm") else ""
            x = x + attention(b, c, b.rms_norm(x, "attn_norm", c.norm_eps), qk_norm=qk_norm, window=window)
            x = x + feed_forward(b, c, b.rms_norm(x, "ffn_norm", c.norm_eps))
    return head(b, c, x)
