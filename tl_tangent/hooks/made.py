"""The hook points that HookedTransformer lacks: what W_Q, W_K, W_V and the MLP read.

``blocks.l.attn.hook_in`` and ``blocks.l.mlp.hook_in`` hold the branch's input after the norm's
affine part. A bridge has them; in a HookedTransformer they are made for as long as somebody needs
them, as a forward pre-hook on the branch that passes its input through ``module.hook_in``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tl_tangent.errors import TangentValueError


def make(model: Any, name: str) -> HookPoint:
    """Make the hook point ``blocks.l.attn.hook_in`` or ``blocks.l.mlp.hook_in`` of ``model``.

    Raises:
        TangentValueError: Q, K and V of this model read different inputs, so there is no one input.
    """
    branch = model.get_submodule(name.rpartition(".")[0])
    if hasattr(branch, "hook_in"):
        return branch.hook_in
    is_attention = name.split(".")[2] == "attn"
    if is_attention and model.cfg.positional_embedding_type == "shortformer":
        raise TangentValueError(
            f"{name} can't be made: under shortformer positions W_Q and W_K read another input "
            "than W_V. Take hook_resid_pre."
        )
    branch.hook_in = HookPoint()
    branch.hook_in.name = name
    reader = _read_attention_input if is_attention else _read_mlp_input
    branch.__dict__["_hook_in_handle"] = branch.register_forward_pre_hook(reader, with_kwargs=True)
    return branch.hook_in


def unmake(model: Any, name: str) -> None:
    """Remove a hook point that :func:`make` made."""
    branch = model.get_submodule(name.rpartition(".")[0])
    branch.__dict__.pop("_hook_in_handle").remove()
    del branch.hook_in


def _busy(point: Any) -> bool:
    splice = point.__dict__.get("_splice")
    return bool(
        point._forward_hooks or point._backward_hooks or (splice is not None and splice.listening)
    )


def _read_mlp_input(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if not _busy(module.hook_in):
        return None
    return (module.hook_in(args[0]), *args[1:]), kwargs


def _read_attention_input(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if not _busy(module.hook_in):
        return None
    names = ("query_input", "key_input", "value_input")
    inputs = [kwargs[name] for name in names]
    _check_one_input(module.hook_in.name, inputs)
    if torch.is_grad_enabled():
        pack = _Pack()
        seen = module.hook_in(_Gather.apply(pack, *reversed(inputs)))
        outputs = _Spread.apply(pack, seen)
    else:
        outputs = (module.hook_in(inputs[0]),) * 3
    return args, {**kwargs, **dict(zip(names, outputs, strict=True))}


def _check_one_input(name: str, inputs: list[Tensor]) -> None:
    if inputs[0].ndim != 3:
        raise TangentValueError(
            f"{name} is one input [batch, pos, d_model] for Q, K and V, and use_split_qkv_input or "
            "use_attn_in gives each head its own. Switch that flag off, or take hook_q_input, "
            "hook_k_input, hook_v_input or hook_attn_in."
        )


class _Pack:
    """The gradients of the three readers of one input, kept apart while their sum is shown."""

    def __init__(self) -> None:
        self.separate: tuple[Tensor, ...] = ()
        self.total: Tensor | None = None


class _Gather(torch.autograd.Function):
    """Three equal inputs, in the order in which autograd reaches them -> the one that is seen."""

    @staticmethod
    def forward(ctx: Any, pack: _Pack, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        ctx.pack = pack
        return query.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        if ctx.pack.total is not None and torch.equal(grad, ctx.pack.total):
            return None, *reversed(ctx.pack.separate)
        return None, grad, None, None


class _Spread(torch.autograd.Function):
    """What the hook point let through -> the three inputs."""

    @staticmethod
    def forward(ctx: Any, pack: _Pack, seen: Tensor):
        ctx.pack = pack
        return seen.detach(), seen.detach(), seen.detach()

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor):
        ctx.pack.separate = (query, key, value)
        total = query + key + value
        ctx.pack.total = total.clone()
        return None, total
