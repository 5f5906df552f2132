"""One question a file; each answer is a frozen value that prints, tabulates and draws itself."""

from tl_tangent.analysis.layer_ablation import LayerAblation, layer_ablation
from tl_tangent.analysis.site_losses import SiteLosses

__all__ = ["LayerAblation", "SiteLosses", "layer_ablation"]
