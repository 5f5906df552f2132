"""What results look like: printed tables, figures and widgets."""

from tl_tangent.views.token_strip import show_token_changes, show_tokens

__all__ = ["show_token_changes", "show_tokens"]
