"""The text of `caudal show --graph`."""

from __future__ import annotations

from caudal.graph.describe import describe
from caudal.models import build_program
from tiny import arrays, checkpoint, metadata


def graph(n_layers: int = 4, changed: tuple[int, ...] = (), *, full: bool = False) -> list[str]:
    opened = checkpoint(arrays(n_layers=n_layers), metadata(block_count=n_layers))
    tensors = {name: f"{tensor.quant_type.name} {list(tensor.shape)}" for name, tensor in opened.tensors.items()}
    for layer in changed:
        tensors[f"blk.{layer}.attn_v.weight"] = "q6_k [16, 24]"
    return describe(build_program(opened)[1], tensors, full=full).splitlines()


def test_equal_layers_are_folded():
    lines = graph()
    assert lines[:3] == [
        "%0 [24] = embed(token_embd.weight f32 [64, 24])",
        "layers 0-3:",
        "  %1 [24] = rms_norm(%0, blk.0.attn_norm.weight f32 [24], eps=1e-05, head_dim=0)",
    ]
    assert "  %5 [32] = rope(%2, head_dim=8, inv_freq=(1, 0.1, ...; 4), style=norm, mscale=1)" in lines
    assert lines[-1].startswith("%63 [64] = linear(%62, token_embd.weight f32")
    assert len(lines) == 1 + 1 + 15 + 3


def test_layers_of_other_types_are_shown_apart():
    headings = [line for line in graph(6, (1, 4)) if line.startswith("layer")]
    assert headings == ["layers 0, 2-3, 5:", "layers 1, 4:"]


def test_full_shows_every_op():
    lines = graph(full=True)
    assert [line for line in lines if line.startswith("layer")] == [f"layer {i}:" for i in range(4)]
    assert len(lines) == 1 + 4 * 16 + 3


def test_weights_without_a_description():
    opened = checkpoint(arrays(), metadata())
    assert describe(build_program(opened)[1], {}).splitlines()[0] == "%0 [24] = embed(token_embd.weight)"
