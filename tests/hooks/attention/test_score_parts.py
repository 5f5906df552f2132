"""Each of the nine terms, not only their sum, against dense matrices written out from weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests import families
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_scores
from tl_tangent.geometry.score_terms import PARTS

GROUP = families.N_HEADS // families.N_KV_HEADS
FAMILIES = ("learned", "rotary_gqa", "gpt2", "llama")
# HuggingFace keeps its table of cosines and sines in float32; everything else here is exact.
TOLERANCE = {"llama": 2e-5}


@dataclass
class Dense:
    """The weights of a layer, keys once a query head."""

    w_q: Tensor
    b_q: Tensor
    w_k: Tensor
    b_k: Tensor
    gain: Tensor
    beta: Tensor
    centred: bool
    eps: float
    rotary: bool

    def centring(self) -> Tensor:
        d = self.gain.numel()
        eye = torch.eye(d, dtype=torch.float64)
        return eye - torch.ones_like(eye) / d if self.centred else eye

    def rotation(self, position: int) -> Tensor:
        """The matrix R of q -> q R at a position: pairs (k, k + half), base 10000."""
        width = self.w_q.shape[-1]
        matrix = torch.eye(width, dtype=torch.float64)
        if not self.rotary:
            return matrix
        half = width // 2
        for k in range(half):
            angle = torch.tensor(position * 10000.0 ** (-k / half), dtype=torch.float64)
            matrix[k, k] = matrix[k + half, k + half] = angle.cos()
            matrix[k, k + half], matrix[k + half, k] = angle.sin(), -angle.sin()
        return matrix


def of_hooked(family: str, layer: int) -> Dense:
    block = cases.model_of(family).blocks[layer]
    attn, norm = block.attn, block.ln1
    grouped = hasattr(attn, "_W_K")
    w_k, b_k = (attn._W_K, attn._b_K) if grouped else (attn.W_K, attn.b_K)
    times = GROUP if grouped else 1
    return Dense(
        w_q=attn.W_Q,
        b_q=attn.b_Q,
        w_k=w_k.repeat_interleave(times, 0),
        b_k=b_k.repeat_interleave(times, 0),
        gain=norm.w,
        beta=norm.b if family == "learned" else torch.zeros_like(norm.w),
        centred=family == "learned",
        eps=norm.eps,
        rotary=family != "learned",
    )


def of_gpt2(layer: int) -> Dense:
    block = families.hf_model("gpt2", torch.float64).transformer.h[layer]
    shape = (families.N_HEADS, families.D_HEAD)
    w_q, w_k, _ = (
        w.unflatten(1, shape).movedim(1, 0) for w in block.attn.c_attn.weight.chunk(3, 1)
    )
    b_q, b_k, _ = (b.unflatten(0, shape) for b in block.attn.c_attn.bias.chunk(3))
    norm = block.ln_1
    return Dense(w_q, b_q, w_k, b_k, norm.weight, norm.bias, True, norm.eps, False)


def of_llama(layer: int) -> Dense:
    block = families.hf_model("llama", torch.float64).model.layers[layer]

    def heads(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, families.D_HEAD)).mT

    w_q = heads(block.self_attn.q_proj.weight)
    w_k = heads(block.self_attn.k_proj.weight).repeat_interleave(GROUP, 0)
    nothing = torch.zeros(families.N_HEADS, families.D_HEAD, dtype=torch.float64)
    norm = block.input_layernorm
    beta = torch.zeros_like(norm.weight)
    eps = norm.variance_epsilon
    return Dense(w_q, nothing, w_k, nothing, norm.weight, beta, False, eps, True)


def dense_of(family: str, layer: int) -> Dense:
    made = {"gpt2": of_gpt2, "llama": of_llama}
    return made[family](layer) if family in made else of_hooked(family, layer)


def input_parts(dense: Dense, x: Tensor, space: str, basis: Tensor, mean: Tensor) -> list[Tensor]:
    """Mean, tangent and normal part of what W_Q and W_K read, ``[batch, pos, d_model]`` each."""
    projector = basis @ basis.T
    eye = torch.eye(len(projector), dtype=torch.float64)
    scale = ((x @ dense.centring()).square().mean(-1, keepdim=True) + dense.eps).sqrt()
    through = dense.centring() @ torch.diag(dense.gain)
    if space == "residual":
        apart = (x - mean) / scale
        own_mean = mean @ through / scale + dense.beta
        return [own_mean, apart @ projector @ through, apart @ (eye - projector) @ through]
    z = x @ through / scale + dense.beta
    return [mean.expand_as(z), (z - mean) @ projector, (z - mean) @ (eye - projector)]


def head_terms(dense: Dense, head: int, parts: list[Tensor]) -> dict[str, Tensor]:
    """The nine terms of one head, all of its biases with the mean, position by position."""
    length = parts[0].shape[1]
    turns = torch.stack([dense.rotation(i) for i in range(length)])
    sides = []
    for weight, bias in ((dense.w_q, dense.b_q), (dense.w_k, dense.b_k)):
        images = [part @ weight[head] for part in parts]
        images[0] = images[0] + bias[head]
        sides.append([torch.einsum("bie,ief->bif", image, turns) for image in images])
    return {
        f"{a}_{b}": query @ key.mT * families.D_HEAD**-0.5
        for a, query in zip(PARTS, sides[0], strict=True)
        for b, key in zip(PARTS, sides[1], strict=True)
    }


@torch.no_grad()
def compare(family: str, layer: int, space: str, per_head: bool) -> None:
    model = cases.model_of(family)
    tokens = families.tiny_tokens(model)
    subspace = cases.subspace(model, layer, space, per_head=per_head)
    split = split_attention_scores(model, tokens, layer, subspace)
    name = f"blocks.{layer}.hook_resid_pre"
    x = cases.captured(model, tokens, [name])[name]
    dense = dense_of(family, layer)
    for head in range(families.N_HEADS):
        own = subspace.head(head) if per_head else subspace
        parts = input_parts(dense, x, space, own.basis, own.mean)
        for term, expected in head_terms(dense, head, parts).items():
            found = split.terms[term][:, head].expand_as(expected)
            assert float((found - expected).abs().max()) < TOLERANCE.get(family, 1e-12), term


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("space", cases.SPACES)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_is_the_dense_one(family, layer, space, per_head):
    compare(family, layer, space, per_head)
