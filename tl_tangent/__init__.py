"""Tangent-subspace hook points for TransformerLens."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.attention.order_results import AttentionTermOrders
from tl_tangent.analysis.attention.patterns import (
    PatternDivergence,
    attention_pattern_divergence,
)
from tl_tangent.analysis.attention.qk_spectrum import QKSpectrum, qk_spectrum
from tl_tangent.analysis.attention.score_split import AttentionScoreSplit
from tl_tangent.analysis.attention.scores import split_attention_layers, split_attention_scores
from tl_tangent.analysis.attention.shares import AttentionTermShares, attention_term_shares
from tl_tangent.analysis.attention.term_losses import (
    AttentionTermLosses,
    attention_term_losses,
)
from tl_tangent.analysis.attention.term_orders import attention_term_orders
from tl_tangent.analysis.frequency.frequency_dispersion import frequency_dispersion
from tl_tangent.analysis.frequency.frequency_result import FrequencyDispersion
from tl_tangent.analysis.gradients.gradient_energy import GradientEnergy, gradient_energy
from tl_tangent.analysis.local.layer_geometry import layer_geometry
from tl_tangent.analysis.local.layer_result import LayerGeometry
from tl_tangent.analysis.local.token_geometry import token_geometry
from tl_tangent.analysis.local.token_result import TokenGeometry
from tl_tangent.analysis.removal_test import RemovalTest, removal_test
from tl_tangent.analysis.stream.part_recovery import PartRecovery, part_recovery
from tl_tangent.analysis.stream.residual_trace import trace_residual
from tl_tangent.analysis.stream.trace_result import ResidualTrace
from tl_tangent.analysis.stream.transfer_gains import TransferGains, transfer_gains
from tl_tangent.analysis.tangent_tokens import TangentTokens, tangent_tokens
from tl_tangent.errors import (
    TangentError,
    TangentFileError,
    TangentImportError,
    TangentKeyError,
    TangentRuntimeError,
    TangentValueError,
)
from tl_tangent.geometry import (
    SubspaceFitter,
    SubspaceSet,
    TangentSubspace,
    isoscore,
    isoscore_from_covariance,
    isoscore_star,
)
from tl_tangent.hooks.attach import ablating, attach, attached, detach, tangents
from tl_tangent.hooks.attention.terms import attention_terms
from tl_tangent.hooks.fit import collect, fit_subspaces
from tl_tangent.hooks.untrained import untrained
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.alignment_result import AlignmentTest
from tl_tangent.studies.checkpoints import CheckpointSeries
from tl_tangent.studies.frequency_series import frequency_over_checkpoints
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.recorder import GradientRecorder
from tl_tangent.studies.simulation import Simulation, simulate
from tl_tangent.views.head_gallery import HeadGallery
from tl_tangent.views.html_report import html_report

if TYPE_CHECKING:
    from tl_tangent.hooks.models import TangentBridge, TangentHookedTransformer

try:
    __version__ = version("tl-tangent")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "AlignmentTest",
    "AttentionScoreSplit",
    "AttentionTermLosses",
    "AttentionTermOrders",
    "AttentionTermShares",
    "CheckpointSeries",
    "FrequencyDispersion",
    "GradientCallback",
    "GradientEnergy",
    "GradientRecorder",
    "GradientRun",
    "HeadGallery",
    "LayerGeometry",
    "PartRecovery",
    "PatternDivergence",
    "QKSpectrum",
    "RemovalTest",
    "ResidualTrace",
    "Simulation",
    "SubspaceFitter",
    "SubspaceSet",
    "TangentBridge",
    "TangentError",
    "TangentFileError",
    "TangentHookedTransformer",
    "TangentImportError",
    "TangentKeyError",
    "TangentRuntimeError",
    "TangentSubspace",
    "TangentTokens",
    "TangentValueError",
    "TokenGeometry",
    "TransferGains",
    "ablating",
    "alignment_test",
    "attach",
    "attached",
    "attention_pattern_divergence",
    "attention_term_losses",
    "attention_term_orders",
    "attention_term_shares",
    "attention_terms",
    "collect",
    "detach",
    "fit_subspaces",
    "frequency_dispersion",
    "frequency_over_checkpoints",
    "gradient_energy",
    "html_report",
    "isoscore",
    "isoscore_from_covariance",
    "isoscore_star",
    "layer_geometry",
    "part_recovery",
    "qk_spectrum",
    "removal_test",
    "simulate",
    "split_attention_layers",
    "split_attention_scores",
    "tangent_tokens",
    "tangents",
    "token_geometry",
    "trace_residual",
    "transfer_gains",
    "untrained",
]


def __getattr__(name: str) -> Any:
    """What takes seconds to import, imported when it is asked for."""
    if name == "TangentHookedTransformer":
        from tl_tangent.hooks import compat

        compat.hooked_transformer_class()  # on TransformerLens 4: says what to install or use
    if name == "GradientCallback":  # imports the Hugging Face Trainer
        from tl_tangent.studies.trainer import GradientCallback

        return GradientCallback
    if name in ("TangentBridge", "TangentHookedTransformer"):
        from tl_tangent.hooks import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
