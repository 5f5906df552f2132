"""HuggingFace causal language models in memory, turned into HookedTransformers without a network.

``HookedTransformer.from_pretrained`` asks the model hub for a configuration even when it is handed
the model. Here the configuration is built from the model's own, family by family
(:mod:`.configs`), and the weights go through TransformerLens' converters (:mod:`.loading`).
"""

from tl_tangent.hooks.from_hf.configs import FAMILIES
from tl_tangent.hooks.from_hf.loading import hooked_from_hf

__all__ = ["FAMILIES", "hooked_from_hf"]
