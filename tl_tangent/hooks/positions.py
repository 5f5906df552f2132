"""Which positions a fit or an ablation takes, in one run of a model.

Positions are absolute: the length of a key-value cache is added, and under left padding they count
from the first real token. Padding is never selected.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.hooks import compat

NOT_FIRST = "not_first"
ALL = "all"
CUSTOM = "custom"

Positions: TypeAlias = str | int | slice | Iterable[int] | Tensor


@dataclass
class Run:
    """What one forward pass is about: its length, what came before it, and what is padding.

    Attributes:
        length: number of positions in this pass, or None where only the pass itself can tell.
        offset: number of positions already in the key-value cache.
        real: [batch, offset + length], False on padding; None where every token is real.
    """

    length: int | None = None
    offset: int = 0
    real: Bool[Tensor, "batch total"] | None = None
    _selected: dict[Any, Tensor | None] = field(default_factory=dict, repr=False)

    def select(self, positions: PositionMask, batch: int, pos: int, device: torch.device):
        """Rows that ``positions`` takes: [batch or 1, pos] bool, or None for every row."""
        if self.length is not None and pos != self.length:
            raise TangentRuntimeError(
                f"this hook point has {pos} positions and the run {self.length}: a position mask "
                "cannot be applied here. Pass positions='all'."
            )
        key = (positions.key, batch, pos, device)
        if key not in self._selected:
            mask = positions.rows(self, pos)
            if mask is not None and mask.shape[0] not in (1, batch):
                mask = _one_row(mask, batch)
            self._selected[key] = None if mask is None else mask.to(device)
        return self._selected[key]

    def absolute(self, pos: int) -> Tensor:
        """Absolute position of every token of this pass: [batch or 1, pos], negative on padding."""
        index = torch.arange(self.offset, self.offset + pos)
        if self.real is None:
            return index[None]
        leading = self.real.int().argmax(dim=1)
        return index[None] - leading[:, None].to(index.device)

    def real_rows(self, pos: int) -> Tensor | None:
        """The tokens of this pass that are not padding: [batch, pos] bool, or None for all."""
        return None if self.real is None else self.real[:, self.offset : self.offset + pos]


def _one_row(mask: Tensor, batch: int) -> Tensor:
    """A site with one row for the whole batch takes the mask that all rows share."""
    if batch == 1 and bool((mask == mask[:1]).all()):
        return mask[:1]
    raise TangentRuntimeError(
        f"the position mask has {mask.shape[0]} rows and this hook point {batch}: the rows differ, "
        "so the mask cannot be applied here. Pass positions='all'."
    )


class PositionMask:
    """A rule that picks positions; the same rule serves fits and ablations.

    Accepted: "all" (every real token), "not_first" (all but absolute position 0), an int, a slice
    or a list of ints (absolute, negative ones counted from the end), or a boolean tensor [pos] or
    [batch, pos] aligned with the tokens as given, at least as long as the sequence.

    Raises:
        TangentValueError: for any other value.
    """

    def __init__(self, positions: Positions = NOT_FIRST):
        self.rule: str | slice | list[int] | Tensor
        if isinstance(positions, PositionMask):
            self.rule = positions.rule
        elif isinstance(positions, str):
            if positions not in (ALL, NOT_FIRST):
                raise TangentValueError(_ACCEPTED.format(positions))
            self.rule = positions
        elif isinstance(positions, Tensor):
            self.rule = _checked_mask(positions)
        elif isinstance(positions, slice):
            self.rule = positions
        elif isinstance(positions, int) and not isinstance(positions, bool):
            self.rule = [positions]
        else:
            self.rule = _checked_list(positions)

    @property
    def description(self) -> str | list[int]:
        """What a subspace remembers of the rule; "custom" for one that only fits its own batch."""
        return self.rule if isinstance(self.rule, (str, list)) else CUSTOM

    @property
    def key(self) -> Any:
        """Equal for two masks that pick alike, as far as is known without comparing tensors."""
        return self.rule if isinstance(self.rule, str) else id(self.rule)

    def __repr__(self) -> str:
        return f"PositionMask({self.rule if not isinstance(self.rule, Tensor) else 'mask'})"

    def rows(self, run: Run, pos: int) -> Tensor | None:
        """Rows of this pass that are taken: [batch or 1, pos] bool on the CPU; None means all."""
        real = run.real_rows(pos)
        if isinstance(self.rule, str) and self.rule == ALL:
            return real
        picked = self._picked(run, pos)
        return picked if real is None else picked & real.to(picked.device)

    def _picked(self, run: Run, pos: int) -> Tensor:
        if isinstance(self.rule, Tensor):
            return self._from_mask(run.offset, pos)
        absolute = run.absolute(pos)
        if isinstance(self.rule, str):
            return absolute != 0
        lengths = absolute[:, -1] + 1 if run.real is None else run.real.sum(dim=1).to("cpu")
        return torch.stack(
            [_take(self.rule, row, int(n)) for row, n in zip(absolute, lengths, strict=True)]
        )

    def _from_mask(self, offset: int, pos: int) -> Tensor:
        mask: Any = self.rule
        if mask.shape[-1] < offset + pos:
            raise TangentValueError(
                f"positions is a mask over {mask.shape[-1]} positions and the sequence has "
                f"{offset + pos}. Give a mask at least as long as the sequence."
            )
        mask = mask[..., offset : offset + pos]
        return mask if mask.ndim == 2 else mask[None]


def _take(rule: slice | list[int], absolute: Tensor, length: int) -> Tensor:
    """The tokens of one row that a slice or a list of absolute positions names."""
    if isinstance(rule, slice):
        wanted = list(range(*rule.indices(length)))
    else:
        bad = [p for p in rule if not -length <= p < length]
        if bad:
            raise TangentValueError(
                f"position {bad[0]} is outside a sequence of {length} tokens: accepted are "
                f"{-length} to {length - 1}. For a sequence that grows, pass a slice or a boolean "
                "mask as long as the sequence will be."
            )
        wanted = [p % length for p in rule]
    return torch.isin(absolute, torch.tensor(wanted, dtype=absolute.dtype))


def _checked_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.ndim not in (1, 2):
        raise TangentValueError(
            f"positions is a {mask.dtype} tensor of shape {tuple(mask.shape)}; a mask is boolean, "
            "[pos] or [batch, pos]. Pass positions as a list of ints to name them by number."
        )
    return mask.detach().to("cpu")


def _checked_list(positions: Any) -> list[int]:
    try:
        positions = list(positions)
        if any(isinstance(p, bool) for p in positions):
            raise TangentValueError(
                "positions is a list of booleans; a mask is a boolean tensor [pos] or [batch, pos]."
            )
        found = [operator.index(p) for p in positions]
    except TypeError:
        raise TangentValueError(_ACCEPTED.format(positions)) from None
    if not found:
        raise TangentValueError("positions is an empty list: nothing would be taken.")
    return found


_ACCEPTED = (
    "positions={!r} is not understood. Accepted: 'all', 'not_first', an int, a slice, a list of "
    "ints, or a boolean tensor [pos] or [batch, pos]."
)


def run_of_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> Run:
    """Read what a call of ``model.forward(*args, **kwargs)`` is about.

    Tokens are padding where the attention mask says so or, without one, where the tokenizer's pad
    token leads (left padding) or trails (right padding).
    """
    kwargs = _by_name(model, args, kwargs)
    given = next(iter(args), kwargs.get("input", kwargs.get("tokens")))
    past = kwargs.get("past_kv_cache", kwargs.get("past_key_values"))
    offset = compat.past_length(past)
    tokens = _tokens(model, given, kwargs)
    mask = kwargs.get("attention_mask", kwargs.get("one_zero_attention_mask"))
    if mask is None and tokens is not None and not tokens.is_floating_point() and offset == 0:
        mask = compat.attention_mask_of_tokens(
            model, tokens, kwargs.get("prepend_bos"), kwargs.get("padding_side")
        )
    length = None if tokens is None else int(tokens.shape[1])
    return Run(length=length, offset=offset, real=_real(mask, length, offset, past))


def _by_name(model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``model.forward`` by their names, however they were passed."""
    bound = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
    return {**bound.get("kwargs", {}), **bound.get("model_kwargs", {}), **bound}


def _tokens(model: Any, given: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Token ids [batch, pos] of a call; residuals without their tokens only lend their shape."""
    if isinstance(given, (str, list)):
        options = {k: kwargs[k] for k in ("prepend_bos", "padding_side") if kwargs.get(k)}
        if kwargs.get("prepend_bos") is False:
            options["prepend_bos"] = False
        if getattr(model, "tokenizer", None) is None:
            raise TangentValueError(
                "the input is text and this model has no tokenizer. Give tokens [batch, pos], or "
                "load the model with its tokenizer."
            )
        return model.to_tokens(given, **options)
    if not isinstance(given, Tensor):
        return None
    if given.is_floating_point():
        tokens = kwargs.get("tokens")
        return given.new_empty(given.shape[:2]) if tokens is None else tokens
    return given if given.ndim == 2 else given[None]


def _real(mask: Tensor | None, length: int | None, offset: int, past: Any) -> Tensor | None:
    remembered = compat.past_mask(past)
    if mask is None and remembered is None:
        return None
    if mask is not None and mask.ndim != 2:
        raise TangentValueError(
            f"attention_mask has the shape {list(mask.shape)}; accepted is [batch, pos], 1 where a "
            "token is real."
        )
    if mask is not None and length is not None and mask.shape[1] not in (length, offset + length):
        raise TangentValueError(
            f"attention_mask has the shape {list(mask.shape)} for {length} positions"
            f"{f' behind {offset} cached ones' if offset else ''}; accepted is one column a "
            "position, 1 where a token is real."
        )
    real = None if mask is None else mask.detach().to("cpu").bool()
    if real is not None and length is not None and real.shape[1] == length and offset:
        before = torch.ones(real.shape[0], offset, dtype=torch.bool)
        if remembered is not None:
            before = remembered.detach().to("cpu").bool()[:, :offset]
        real = torch.cat([before, real], dim=1)
    elif real is None and remembered is not None and length is not None:
        before = remembered.detach().to("cpu").bool()[:, :offset]
        real = torch.cat([before, torch.ones(before.shape[0], length, dtype=torch.bool)], dim=1)
    return None if real is None or bool(real.all()) else real
