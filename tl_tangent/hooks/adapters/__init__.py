"""Adapters for masked language models that TransformerLens has none for."""

from tl_tangent.hooks.adapters.register import ADAPTERS, register_adapters

__all__ = ["ADAPTERS", "register_adapters"]
