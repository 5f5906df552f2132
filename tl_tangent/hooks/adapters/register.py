"""Which architectures get an adapter of ours, and how TransformerLens learns of them."""

from __future__ import annotations

from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

from tl_tangent.hooks.adapters.eurobert import EuroBertAdapter
from tl_tangent.hooks.adapters.modernbert import ModernBertAdapter
from tl_tangent.hooks.adapters.roberta import RobertaAdapter

ADAPTERS: dict[str, type[ArchitectureAdapter]] = {
    "EuroBertForMaskedLM": EuroBertAdapter,
    "ModernBertForMaskedLM": ModernBertAdapter,
    "CamembertForMaskedLM": RobertaAdapter,
    "RobertaForMaskedLM": RobertaAdapter,
    "XLMRobertaForMaskedLM": RobertaAdapter,
}


def register_adapters() -> list[str]:
    """Register each of ``ADAPTERS`` that TransformerLens, or another package, has no adapter for.

    Returns:
        The architectures that were registered by this call.
    """
    factory = ArchitectureAdapterFactory
    factory.discover_entry_points()
    missing = [name for name in ADAPTERS if name not in factory._adapters]
    for name in missing:
        factory.register_adapter(name, ADAPTERS[name])
        # boot_transformers asks these two which architectures and model classes there are
        SUPPORTED_ARCHITECTURES[name] = ADAPTERS[name]
        MASKED_LM_ARCHITECTURES.add(name)
    return missing
