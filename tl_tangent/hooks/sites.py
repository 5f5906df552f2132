"""Sites: the hook points that can be spliced, by name, pattern or predicate.

A pattern matches whole names; ``*`` stands for one dotted part and ``**`` for any number of them,
so ``blocks.*.hook_resid_post`` is every layer and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_tangent.errors import TangentKeyError, TangentValueError, nearest
from tl_tangent.hooks import compat

Sites: TypeAlias = str | Iterable[str] | Callable[[str], bool]

PARTS = ("hook_coords", "hook_tangent", "hook_normal")
# Hook points whose last axis is not a space of activations [batch, pos, ..., d].
_NOT_VECTORS = (
    "hook_attn_scores",
    "hook_pattern",
    "hook_scale",
    "hook_rot_q",
    "hook_rot_k",
    "hook_cos",
    "hook_sin",
    "hook_tokens",
    "hook_position_ids",
    "hook_attention_mask",
    "rotary_emb.hook_out",
    "embed.hook_in",
)
_MADE = re.compile(r"blocks\.(\d+)\.(attn|mlp)\.hook_in")
_HEAD_SITES = {
    "hook_q": ("n_heads", "d_head"),
    "hook_k": ("n_key_value_heads", "d_head"),
    "hook_v": ("n_key_value_heads", "d_head"),
    "hook_z": ("n_heads", "d_head"),
    "hook_result": ("n_heads", "d_model"),
}
_HEAD_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_attn_in")
_STREAM_SITES = (
    "hook_embed",
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_mlp_in",
)


@dataclass(frozen=True)
class Site:
    """One spliceable hook point of one model.

    Attributes:
        name: the name it was asked for by.
        hook_point: the hook point itself; None for one that has to be made first
            (``attn.hook_in`` and ``mlp.hook_in`` of a HookedTransformer).
        stream: whether it is asked for as the residual stream itself where the hook point feeds a
            branch alone: a bridge's ``hook_resid_mid``.
    """

    name: str
    hook_point: HookPoint | None
    stream: bool = False

    @property
    def layer(self) -> int | None:
        found = re.match(r"blocks\.(\d+)\.", self.name)
        return int(found.group(1)) if found else None

    @property
    def per_head(self) -> bool:
        """Whether the hook point holds [batch, pos, head, width]."""
        return self.name.rpartition(".")[2] in (*_HEAD_SITES, *_HEAD_INPUTS)

    @property
    def gate(self) -> str | None:
        """The configuration flag that has to be on for this hook point to fire."""
        return compat.GATED_HOOKS.get(self.name.rpartition(".")[2])


def find_sites(
    model: Any, sites: Sites, known: dict[str, HookPoint | None] | None = None
) -> list[Site]:
    """The sites of ``model`` that a name, a pattern, a list of them, or a predicate names.

    Two names of one hook point give one site, under the first of them. ``known`` is what
    :func:`known_sites` says of the model, where that is at hand already.

    Raises:
        TangentKeyError: a name or pattern that matches nothing here; the message lists the nearest
            names that do exist.
    """
    known = known_sites(model) if known is None else known
    if callable(sites):
        names = [name for name in known if sites(name)]
        if not names:
            raise TangentKeyError("the predicate given as sites matches no hook point of the model")
    else:
        asked = [sites] if isinstance(sites, str) else list(sites)
        names = [name for pattern in asked for name in _matches(model, known, pattern)]
    unique: dict[Any, Site] = {}
    for name in names:
        hook_point = known[name]
        site = Site(name, hook_point, _is_stream(model, known, name))
        unique.setdefault(name if hook_point is None else id(hook_point), site)
    return list(unique.values())


def _is_stream(model: Any, known: dict[str, HookPoint | None], name: str) -> bool:
    """On a bridge: is this resid_mid's hook point, and not asked for as the MLP's own input?"""
    block = re.match(r"blocks\.\d+\.", name)
    if block is None or not compat.is_bridge(model) or is_made(name):
        return False
    return known.get(f"{block.group()}hook_resid_mid") is known[name]


def _matches(model: Any, known: dict[str, HookPoint | None], pattern: str) -> Iterator[str]:
    if pattern in known:
        yield pattern
        return
    regex = re.compile(re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+"))
    found = [name for name in known if regex.fullmatch(name)]
    if not found:
        raise TangentKeyError(_missing(model, known, pattern))
    yield from sorted(found, key=_depth)


def _depth(name: str) -> float:
    """The layer, by which a bridge does not sort its names (10 stands in front of 2 there)."""
    block = re.match(r"blocks\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return math.inf if name.startswith(("ln_final", "unembed", "hook_unembed")) else -1


def _missing(model: Any, known: dict[str, HookPoint | None], pattern: str) -> str:
    if pattern.rpartition(".")[2] in PARTS:
        return f"{pattern!r} is a part of a spliced site, not a site. Name the site itself."
    occupant = _occupant(model, pattern)
    if occupant is not None:
        return (
            f"at {pattern!r} sits a {occupant}, in the place of the hook point. Take the SAE off "
            "first (reset_saes), or choose another site: both work side by side."
        )
    if pattern.endswith(_NOT_VECTORS):
        return (
            f"{pattern!r} does not hold activation vectors [batch, pos, ..., d], so it has no "
            f"tangent part. Nearest sites that do: {nearest(pattern, known)}."
        )
    hint = ""
    if pattern.endswith("hook_resid_mid") and _has_parallel_blocks(model):
        hint = (
            " Attention and MLP of this model run in parallel, so there is no resid_mid: "
            "take hook_resid_pre or hook_resid_post."
        )
    hint += _layer_hint(model, pattern)
    return f"this model has no site {pattern!r}.{hint} Nearest: {nearest(pattern, known)}."


def _layer_hint(model: Any, pattern: str) -> str:
    layer = re.match(r"blocks\.(\d+)\.", pattern)
    n_layers = getattr(model.cfg, "n_layers", None)
    if layer is None or n_layers is None or int(layer.group(1)) < n_layers:
        return ""
    return f" Its layers are 0 to {n_layers - 1}."


def _occupant(model: Any, name: str) -> str | None:
    """What has replaced the hook point of this name: SAELens puts a wrapper of its SAE there."""
    try:
        module: Any = model.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, HookPoint) or "hook_" not in name:
        return None
    return type(getattr(module, "sae", module)).__name__


def _has_parallel_blocks(model: Any) -> bool:
    return not any(name.endswith("hook_resid_mid") for name in model.hook_dict)


def known_sites(model: Any) -> dict[str, HookPoint | None]:
    """Every spliceable name of ``model``; the value is None where the hook point is yet to be made.

    Raises:
        TangentValueError: ``model`` has no TransformerLens hook points.
    """
    if not compat.is_hooked(model):
        raise TangentValueError(
            f"a {type(model).__name__} has no TransformerLens hook points. Accepted: a "
            "HookedTransformer, a TransformerBridge, or any HookedRootModule."
        )
    sites: dict[str, HookPoint | None] = {
        name: hook_point
        for name, hook_point in model.hook_dict.items()
        if name.rpartition(".")[2] not in PARTS
        and not name.endswith(_NOT_VECTORS)
        and not compat.never_fires(model, hook_point)
    }
    for name in _makeable(model):
        sites.setdefault(name, None)
    return sites


def _makeable(model: Any) -> Iterator[str]:
    """``attn.hook_in`` and ``mlp.hook_in``: HookedTransformer has no hook point after its norms."""
    if compat.is_bridge(model) or not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return
    for layer, block in enumerate(model.blocks):
        for branch in ("attn", "mlp"):
            if hasattr(block, branch):
                yield f"blocks.{layer}.{branch}.hook_in"


def is_made(name: str) -> bool:
    return _MADE.fullmatch(name) is not None


def in_layers(sites: Iterable[Site], layers: Iterable[int] | int | None, n_layers: int):
    """The sites that lie in ``layers``; every site for None. Negative layers count from the end.

    Raises:
        TangentValueError: a layer that the model does not have, or none of the sites in them.
    """
    sites = list(sites)
    if layers is None:
        return sites
    asked = [layers] if isinstance(layers, int) else list(layers)
    bad = [layer for layer in asked if not -n_layers <= layer < n_layers]
    if bad:
        raise TangentValueError(
            f"layer {bad[0]} does not exist: this model has layers 0 to {n_layers - 1}."
        )
    wanted = {layer % n_layers for layer in asked}
    found = [site for site in sites if site.layer in wanted]
    if not found:
        raise TangentValueError(
            f"none of the sites is in layers {sorted(wanted)}: "
            f"{', '.join(site.name for site in sites[:5])}."
        )
    return found


def expected_shape(model: Any, site: Site) -> tuple[int | None, int | None]:
    """(heads, width) of the vectors at a site, as the configuration tells; None where it does not.

    Grouped key-value heads are counted by their own number.
    """
    cfg, leaf = model.cfg, site.name.rpartition(".")[2]
    if leaf in _HEAD_SITES and ".attn." in site.name:
        heads, width = _HEAD_SITES[leaf]
        n_heads = getattr(cfg, heads, None) or cfg.n_heads
        if getattr(cfg, "ungroup_grouped_query_attention", False):
            n_heads = cfg.n_heads
        return n_heads, getattr(cfg, width)
    if leaf in _STREAM_SITES or (is_made(site.name) and ".attn." in site.name):
        return None, cfg.d_model
    return None, None
