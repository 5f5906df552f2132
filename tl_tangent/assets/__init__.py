"""Real weights and text that need no model hub: SmolLM2-135M, Python's manual, docstrings.

Nothing heavy is imported here; :func:`embedded_smollm2` imports transformers when it is called.
"""

from tl_tangent.assets.cache import cache_folder
from tl_tangent.assets.docstrings import EncodedText, installed_docstrings
from tl_tangent.assets.smollm2 import EmbeddedModel, embedded_smollm2
from tl_tangent.assets.text import language_reference, read_text, split_disjoint, token_batches

__all__ = [
    "EmbeddedModel",
    "EncodedText",
    "cache_folder",
    "embedded_smollm2",
    "installed_docstrings",
    "language_reference",
    "read_text",
    "split_disjoint",
    "token_batches",
]
