"""What a model is trained on: the loss whose gradients are measured, of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat

KEYS = {"input_ids", "input", "attention_mask", "labels", "token_type_ids", "special_tokens_mask"}
IGNORED = -100  # Hugging Face's label of a token that is not predicted


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens, which of them are real, and what is predicted at each position.

    Attributes:
        tokens: ``[batch, pos]``, as the model reads them.
        mask: which are real; None for all.
        labels: what is predicted at each position, -100 for nothing; None: the next token.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None = None
    labels: Int[Tensor, "batch pos"] | None = None

    @classmethod
    def of(cls, given: Any) -> Batch:
        """Accept tokens, or a mapping with ``input_ids`` as Hugging Face's collators make it.

        Raises:
            TangentValueError: neither, or tokens that are not ``[batch, pos]`` integers.
        """
        if isinstance(given, Batch):
            return given
        found = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
        tokens = found.get("input_ids", found.get("input"))
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
            what = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TangentValueError(
                f"a batch is a tensor of token ids [batch, pos], or a mapping with that under "
                f"'input_ids' (and 'attention_mask', 'labels'); got {what}"
            )
        _check_keys(found)
        if not tokens.numel():
            raise TangentValueError(
                f"a batch of {list(tokens.shape)} tokens is empty: leave it out"
            )
        mask, labels = found.get("attention_mask"), found.get("labels")
        for name, one in (("attention_mask", mask), ("labels", labels)):
            if one is not None and one.shape != tokens.shape:
                raise TangentValueError(
                    f"{name} is {list(one.shape)} and the tokens {list(tokens.shape)}"
                )
        real = None if mask is None or bool(mask.bool().all()) else mask.bool()
        return cls(tokens.long(), real, labels)

    def real_tokens(self) -> Bool[Tensor, " token"] | None:
        """Which rows of ``[batch * pos]`` are real; None for all."""
        return None if self.mask is None else self.mask.flatten()

    def to(self, device: torch.device) -> Batch:
        """Return the same on a device; no inference tensors, which a graph can't keep."""
        mask = None if self.mask is None else self.mask.to(device).clone()
        labels = None if self.labels is None else self.labels.to(device).clone()
        return Batch(self.tokens.to(device).clone(), mask, labels)


def _check_keys(given: Mapping[str, Any]) -> None:
    """Refuse what would change the model's reading and is not passed on."""
    plain = given.get("token_type_ids")
    unknown = sorted(set(given) - KEYS)
    if plain is not None and bool(plain.any()):
        unknown.append("token_type_ids (other than 0)")
    if unknown:
        raise TangentValueError(
            f"a batch has {', '.join(unknown)}, which is not passed on to the model; it takes "
            f"{', '.join(sorted(KEYS))}. Leave it out, or give an objective (model, batch) -> loss "
            "that passes it on"
        )


Objective: TypeAlias = Literal["causal", "masked"] | Callable[[Any, Batch], Tensor]


def loss_of(objective: Objective, model: Any, batch: Batch) -> Float[Tensor, ""]:
    """Return the mean loss of a batch, in nats a predicted token.

    Args:
        objective: ``"causal"`` predicts the next token (or the labels, shifted as Hugging Face
            shifts them); ``"masked"`` predicts the labels where they stand (see
            :func:`mask_tokens`); a callable takes the model and the batch.
        model: a Hugging Face model, a bridge or a HookedTransformer.
        batch: what it reads.

    Raises:
        TangentValueError: no such objective, no labels for a masked one, or nothing to predict.
    """
    if callable(objective):
        return objective(model, batch)
    if objective not in ("causal", "masked"):
        raise TangentValueError(
            f"objective {objective!r} is not 'causal', 'masked' or a callable (model, batch)"
        )
    if objective == "causal":
        labels = batch.tokens if batch.labels is None else batch.labels
        labels = labels[:, 1:]
        if batch.mask is not None:  # no token predicts padding, and padding predicts no token
            labels = labels.masked_fill(~(batch.mask[:, 1:] & batch.mask[:, :-1]), IGNORED)
    elif batch.labels is None:
        raise TangentValueError("a masked objective needs labels: make the batches by mask_tokens")
    else:
        labels = batch.labels
        if batch.mask is not None:  # padding predicts nothing
            labels = labels.masked_fill(~batch.mask, IGNORED)
    if not bool((labels != IGNORED).any()):
        raise TangentValueError(
            f"nothing is predicted in a batch of {list(batch.tokens.shape)} tokens: all labels "
            "are padding or -100"
        )
    logits = logits_of(model, batch)[:, : labels.shape[1]]
    full = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return cross_entropy(full.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def logits_of(model: Any, batch: Batch) -> Float[Tensor, "batch pos vocab"]:
    """Return the logits of any of the three kinds of model."""
    options: dict[str, Any] = {}
    if batch.mask is not None:
        options["attention_mask"] = batch.mask.long()
    if compat.is_hooked(model):
        return model(batch.tokens, return_type="logits", **options)
    if hasattr(getattr(model, "config", None), "use_cache"):
        options["use_cache"] = False
    return model(input_ids=batch.tokens, **options).logits


def mask_tokens(
    tokens: Int[Tensor, "batch pos"],
    *,
    mask_token: int,
    vocabulary: int,
    attention_mask: Tensor | None = None,
    special: tuple[int, ...] = (),
    share: float = 0.15,
    replaced: float = 0.1,
    kept: float = 0.1,
    seed: int = 0,
) -> Batch:
    """Choose tokens to be predicted, and hide them (Devlin et al. 2019).

    Args:
        tokens: the text.
        mask_token: id of the mask.
        vocabulary: number of token ids.
        attention_mask: real tokens; others are never chosen.
        special: ids that are never chosen.
        share: of the tokens that are chosen.
        replaced: share of the chosen that become a random token instead of the mask.
        kept: share of the chosen that stay as they are.
        seed: of the choice.

    Raises:
        TangentValueError: shares outside of [0, 1].
    """
    if not (0 < share <= 1 and min(replaced, kept) >= 0 and replaced + kept <= 1):
        raise TangentValueError(f"share={share}, replaced={replaced}, kept={kept} are no shares")
    plain = Batch.of({"input_ids": tokens, "attention_mask": attention_mask})
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.ones_like(tokens, dtype=torch.bool) if plain.mask is None else plain.mask.cpu()
    allowed = allowed.cpu() & ~torch.isin(tokens.cpu(), torch.tensor(special, dtype=tokens.dtype))
    chosen = (torch.rand(tokens.shape, generator=generator) < share) & allowed
    fate = torch.rand(tokens.shape, generator=generator)
    random = torch.randint(vocabulary, tokens.shape, generator=generator)
    shown = tokens.cpu().clone()
    shown[chosen & (fate >= replaced + kept)] = mask_token
    swapped = chosen & (fate < replaced)
    shown[swapped] = random[swapped].to(shown.dtype)
    labels = torch.where(chosen, tokens.cpu(), torch.tensor(IGNORED))
    return Batch(shown.to(tokens.device), plain.mask, labels.to(tokens.device))
