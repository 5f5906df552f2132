"""HookedTransformer and TransformerBridge with tangent hook points as methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from transformer_lens.model_bridge import TransformerBridge

from tl_tangent.hooks import attach as _attach
from tl_tangent.hooks import compat
from tl_tangent.hooks.adapters import register_adapters
from tl_tangent.hooks.attention.terms import attention_terms
from tl_tangent.hooks.sites import Sites

register_adapters()


class TangentMethods:
    """The tangent methods that both model classes share; each calls the function of its name."""

    def attach(self, subspaces: Any, sites: Sites | None = None, *, any_model: bool = False):
        """Put tangent hook points in, until detached; see :func:`tl_tangent.attach`."""
        return _attach.attach(self, subspaces, sites, any_model=any_model)

    def detach(self, sites: Sites | None = None):
        """Take tangent hook points out; see :func:`tl_tangent.detach`."""
        return _attach.detach(self, sites)

    def tangents(
        self, subspaces: Any, sites: Sites | None = None, *, any_model: bool = False
    ) -> AbstractContextManager:
        """Attach for a ``with`` block; see :func:`tl_tangent.tangents`."""
        return _attach.tangents(self, subspaces, sites, any_model=any_model)

    def ablating(self, subspaces: Any = None, **options: Any) -> AbstractContextManager:
        """Ablate for a ``with`` block; see :func:`tl_tangent.ablating` for the options."""
        return _attach.ablating(self, subspaces, **options)

    def attention_terms(self, subspaces: Any = None, **options: Any) -> AbstractContextManager:
        """Drop or scale terms of the scores; see :func:`tl_tangent.attention_terms`."""
        return attention_terms(self, subspaces, **options)

    def run_with_tangents(self, input: Any, subspaces: Any, sites: Sites | None = None, **kwargs):
        """``model(input, **kwargs)`` with ``subspaces`` attached for this call."""
        with self.tangents(subspaces, sites):
            return self(input, **kwargs)  # type: ignore[operator]

    def run_with_cache_with_tangents(
        self, input: Any, subspaces: Any, sites: Sites | None = None, **kwargs: Any
    ):
        """``run_with_cache(input, **kwargs)`` with ``subspaces`` attached; the cache has the parts.

        Without a ``names_filter`` everything is cached, parts included.
        """
        with self.tangents(subspaces, sites):
            return self.run_with_cache(input, **kwargs)  # type: ignore[attr-defined]

    def run_with_hooks_with_tangents(
        self,
        input: Any,
        subspaces: Any,
        sites: Sites | None = None,
        *,
        fwd_hooks: Iterable[tuple[str | Callable, Callable]] = (),
        bwd_hooks: Iterable[tuple[str | Callable, Callable]] = (),
        **kwargs: Any,
    ):
        """``run_with_hooks(input, ...)`` with ``subspaces`` attached: hooks may name parts."""
        with self.tangents(subspaces, sites):
            return self.run_with_hooks(  # type: ignore[attr-defined]
                input, fwd_hooks=list(fwd_hooks), bwd_hooks=list(bwd_hooks), **kwargs
            )

    def extra_repr(self) -> str:
        """Name what is attached, so that it never goes unnoticed."""
        rows = [f"{site}: {subspace}" for site, subspace in _attach.attached(self).items()]
        return "\n".join(["tangents attached at", *rows]) if rows else ""


class TangentBridge(TangentMethods, TransformerBridge):
    """TransformerBridge with tangent hook points; every constructor returns this class."""

    @classmethod
    def boot_transformers(cls, *args: Any, **kwargs: Any) -> TangentBridge:
        """As :meth:`TransformerBridge.boot_transformers`."""
        return cls.wrap(super().boot_transformers(*args, **kwargs))

    @classmethod
    def boot_native(cls, *args: Any, **kwargs: Any) -> TangentBridge:
        """As :meth:`TransformerBridge.boot_native`."""
        return cls.wrap(super().boot_native(*args, **kwargs))

    @classmethod
    def from_hf(cls, hf_model: Any, tokenizer: Any = None, **kwargs: Any) -> TangentBridge:
        """Bridge a Hugging Face model that is already in memory, without a network.

        The bridge puts its own modules into ``hf_model``, which should not be used on its own then.

        Args:
            hf_model: any model whose architecture TransformerLens has an adapter for, or
                :mod:`tl_tangent.hooks.adapters` has.
            tokenizer: its tokenizer, loaded from a folder or the hub; None to pass tokens only.
            kwargs: passed on to TransformerLens' bridge builder, such as ``dtype`` or ``device``.
        """
        return cls.wrap(compat.bridge_from_hf(hf_model, tokenizer, **kwargs))

    @classmethod
    def wrap(cls, bridge: TransformerBridge) -> TangentBridge:
        """Turn an existing bridge, in place, into one of this class."""
        bridge.__class__ = cls
        return bridge  # type: ignore[return-value]


if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
elif compat.has_hooked_transformer():
    HookedTransformer = compat.hooked_transformer_class()

if TYPE_CHECKING or compat.has_hooked_transformer():

    class TangentHookedTransformer(TangentMethods, HookedTransformer):
        """HookedTransformer with tangent hook points as methods."""

        @classmethod
        def from_hf(
            cls, hf_model: Any, tokenizer: Any = None, **kwargs: Any
        ) -> TangentHookedTransformer:
            """Convert a Hugging Face model that is already in memory, without a network.

            Arguments and errors are those of :func:`tl_tangent.hooks.from_hf.hooked_from_hf`.
            """
            from tl_tangent.hooks.from_hf import hooked_from_hf

            return hooked_from_hf(hf_model, tokenizer, model_class=cls, **kwargs)
