"""The hook point of a part: an ordinary HookPoint that knows whether somebody listens to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat


class PartHookPoint(HookPoint):
    """``S.hook_coords``, ``S.hook_tangent`` or ``S.hook_normal`` of a spliced site S."""

    def adopt(self, site_point: HookPoint | None, per_head: bool) -> None:
        """Take over from the site where ``pos_slice`` finds the position axis."""
        self.pos_dim: Any = getattr(site_point, "pos_dim", None)
        self.hook_conversion = compat.HeadsKept() if per_head else None

    @property
    def name(self) -> str | None:  # type: ignore[override]
        return self._name

    @name.setter
    def name(self, value: str | None) -> None:
        self._name = None if value is None else PartName(value)

    @property
    def listening(self) -> bool:
        """Whether anything would be called when a value or a gradient passes."""
        return bool(self._forward_hooks or self._forward_pre_hooks) or self.differentiated

    @property
    def differentiated(self) -> bool:
        """Whether anything would be called when a gradient passes."""
        return bool(self._backward_hooks or self._backward_pre_hooks)

    def checked(self, returned: Any, exact: Tensor, dtype: torch.dtype) -> Tensor:
        """A hook's return value in the dtype that it was handed.

        Raises:
            TangentValueError: it is no tensor of the part's shape.
        """
        if not isinstance(returned, Tensor) or returned.shape != exact.shape:
            got = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
            raise TangentValueError(
                f"a hook on {self.name} returned {got}; a part keeps its shape, which is "
                f"{tuple(exact.shape)}."
            )
        return returned.to(dtype)


class PartName(str):
    """The name of a part, which also ends as its site does.

    TransformerLens 3.9 finds the position axis for ``pos_slice`` by the end of the name
    (``hook_q``, ``hook_z``, ...), and a part has the axes of its site.
    """

    def endswith(self, suffix: str | tuple[str, ...], *span: Any) -> bool:  # type: ignore[override]
        return super().endswith(suffix, *span) or str(self).rpartition(".")[0].endswith(suffix)
