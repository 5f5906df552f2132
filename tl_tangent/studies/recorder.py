"""Record gradient energies inside a training loop, step by step, in bounded memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from tl_tangent.analysis.gradients.activations import name_of
from tl_tangent.analysis.gradients.meter import GradientMeter
from tl_tangent.analysis.gradients.passes import check_trainable
from tl_tangent.analysis.gradients.statistics import Label
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.watch import watching_activations
from tl_tangent.hooks.gradients.weight import Weights
from tl_tangent.hooks.numbers import whole, whole_seed, wholes
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.studies.gradient_run import GradientRun, Step
from tl_tangent.studies.proxy import Kind, Proxy, ProxyOptions
from tl_tangent.studies.run_records import Records, State


class GradientRecorder:
    """Energies of the weight gradients in Q_T and matched normals, at every step of a training.

        with GradientRecorder(model, subspaces, out="runs/a") as recorder:
            for step, batch in enumerate(loader):
                loss = model(**batch).loss
                loss.backward()
                recorder.record(step, loss)
                optimizer.step()
                optimizer.zero_grad()
                if step % 1000 == 999:
                    save_my_checkpoint(step)
                    recorder.flush()  # a restart from here goes on exactly

    ``record`` stands between ``backward`` and the optimizer's step, and reads the gradients that
    lie in the parameters then: accumulated, clipped or scaled as they are, which no ratio notices.
    Nothing is recorded of a step whose gradients are not finite (a mixed-precision overflow), and
    the run says how many. Records reach the disk every ``flush_every`` steps, in front of every
    checkpoint and on leaving; with ``out`` they do not stay in memory.

    **Restarts.** Make the recorder with the same options and ``start=`` the first step to come.
    What was recorded from there on is dropped, Q_T is the one fitted last before it, and the
    activations behind the next fit are those of the last ``flush()``, ``save_at`` or end (of the
    last two; older ones are deleted). Where that was right before ``start``, all is as if nothing
    had happened; else the fit misses some activations, which is warned of and told in
    ``conventions["resumed"]``.

    Args:
        model: a Hugging Face model, a bridge or a HookedTransformer in training.
        subspaces: Q_T at the site of every weight, for the ``"frozen"`` proxy.
        out: folder of the records; None keeps them in memory.
        proxy: ``"frozen"``: Q_T stays what was given. ``"follow"``: it is fitted again every
            ``refit_every`` steps, on the activations of the steps before. ``"early"``: it follows
            until ``freeze_at`` and stays then, fitted on all activations up to there, those of
            each ``refit_every`` steps around their own mean. The first fit follows the first step,
            which is not recorded itself.
        start: the first step to come; None for a new run, or one that goes on behind the last step
            in ``out``.
        rank, method, positions: of a fit; see :func:`tl_tangent.fit_subspaces`. The rank is a whole
            number. Positions count within a row as the model is given it: padding on the left or
            in packed rows is not known here.
        refit_every, freeze_at: in steps as ``record`` is given them; a fit follows the first
            recorded step that reaches or passes such a point.
        activations_every: activations are looked at in every so many steps, for fits and for their
            own share in Q_T.
        kinds, layers: which weights; all by default.
        n_controls: B, matched random normals at each site.
        nulls: also record what is mechanical; one forward and backward pass a step, then: with
            accumulated gradients the null would be that of the last pass alone.
        save_at: which steps to save the model at, before their update: steps, or a predicate. They
            go to ``out/checkpoints/step-N`` by ``save_pretrained``, in the place of one that is
            there; a restart from there is exact.
        flush_every: steps.
        weights: other weights than :func:`~tl_tangent.hooks.gradients.find.find_weights` finds.
        seed: of the controls.

    Raises:
        TangentValueError: options that contradict each other, or a model that
            :func:`~tl_tangent.gradient_energy` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        subspaces: Mapping[str, TangentSubspace] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        start: int | None = None,
        proxy: Kind = "frozen",
        rank: int = 8,
        method: str = "pca",
        positions: Positions = NOT_FIRST,
        refit_every: int = 100,
        freeze_at: int | None = None,
        activations_every: int = 10,
        kinds: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        n_controls: int = 20,
        nulls: bool = False,
        save_at: Iterable[int] | Callable[[int], bool] = (),
        flush_every: int = 100,
        weights: Weights | None = None,
        seed: int = 0,
    ) -> None:
        options = ProxyOptions(
            proxy,
            rank,
            method,
            whole("refit_every", refit_every, 1),
            _step("freeze_at", freeze_at),
            whole("activations_every", activations_every, 1),
        )
        options.check(subspaces)
        flush_every = whole("flush_every", flush_every, 1)
        self._saved = _predicate(save_at, out, model)
        self.weights = (weights or find_weights(model)).choose(kinds, layers)
        check_trainable(self.weights)
        self.model, self._options = model, options
        self._mask = PositionMask(positions)
        self._measured: dict[str, Any] = {
            "n_controls": whole("n_controls", n_controls, 0),
            "seed": whole_seed(seed),
            "nulls": bool(nulls),
        }
        self._proxy = Proxy(self.weights, self._mask, options)
        self._subspaces: SubspaceSet | None = None
        self._meter: GradientMeter | None = None
        self._shares: dict[str, Tensor] = {}
        self._open: list[Any] = []
        self._looked = self._saw = self._told_blind = False
        if subspaces is not None:
            self._hold(subspaces)
        self._records = Records(out, flush_every, self._told())
        if self._meter is not None:
            self._records.hold(self._meter.labels)
        self._next: int | None = None
        self._go_on(_step("start", start))

    def _told(self) -> dict[str, Any]:
        """What the records are about, JSON-able."""
        options, given = self._options, self._meter
        return {
            "model": name_of(self.model),
            "model_class": type(self.model).__name__,
            "proxy": options.kind,
            "rank": options.rank if given is None else _ranks(given),
            "given": None if given is None else _fingerprint(given),
            "method": options.method if given is None else None,
            "refit_every": options.refit_every,
            "freeze_at": options.freeze_at,
            "activations_every": options.activations_every,
            "positions": self._mask.description,
            "weights": [weight.name for weight in self.weights.weights],
            **self._measured,
        }

    def _go_on(self, start: int | None) -> None:
        """Take up what an earlier run in the same folder knew."""
        records = self._records
        if records.last_step < 0:
            return
        self._next = records.last_step + 1 if start is None else start
        state, fit = records.state_before(self._next), records.fit_before(self._next)
        usable = state is not None and (self._options.kind == "early" or state.step >= fit)
        behind = state is not None and state.step == self._next - 1
        known = fit if self._options.kind == "follow" else -1
        if state is not None and usable:
            known = state.step
        self._proxy.last_fit = fit
        missing = not (behind or self._proxy.stays or fit < 0)
        records.go_on(self._next, known if missing else None)
        kept = records.activations(state) if state is not None and usable else None
        self._proxy.take_up(fit, 0 if state is None else state.calls, kept)
        if missing:
            self._warn_of_gap(known)
        fitted = records.last_fit()
        if fitted is not None:
            records.hold(self._hold(fitted))

    def _warn_of_gap(self, known: int) -> None:
        warnings.warn(
            f"the recorder goes on at step {self._next}, but of the activations that the next fit "
            f"adds to it knows {f'those up to step {known}' if known >= 0 else 'none'}. Call "
            "recorder.flush() where you save a checkpoint, and restarts from there are exact.",
            stacklevel=4,
        )

    @property
    def subspaces(self) -> SubspaceSet | None:
        """Q_T at every site, as it is now; None before the first fit."""
        return self._subspaces

    # The loop ----------------------------------------------------------------------------------

    def __enter__(self) -> GradientRecorder:
        self._stop_watching()  # twice on a model would count activations twice
        self._watch_step()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        freeze_at = self._options.freeze_at
        if error[0] is None and freeze_at is not None and not self._proxy.stays:
            warnings.warn(
                f"the training ended before step freeze_at={freeze_at} was recorded, so Q_T has "
                f"followed all the time (last fit behind step {self._proxy.last_fit})",
                stacklevel=2,
            )

    def close(self) -> None:
        """Take all hooks off the model, and put what is left on disk."""
        self._stop_watching()
        self.flush()

    def flush(self) -> None:
        """Put on disk all that was recorded, and what an exact restart behind it needs.

        Within a step, between its forward pass and ``record``, there is no such state to keep.
        """
        last, fitters = self._records.last_step, self._proxy.fitters
        if last < 0 or self._saw:
            self._records.flush()
        else:
            self._records.keep(State(last, self._proxy.calls, fitters is not None), fitters)

    def record(self, step: int, loss: Tensor | float | None = None) -> None:
        """Record the gradients that lie in the parameters, before the optimizer uses them.

        Args:
            step: its number, counted through all epochs; the last step may be recorded again,
                which replaces it.
            loss: kept beside it.

        Raises:
            TangentValueError: a step that is no whole number from 0, or a loss that is no number.
            TangentRuntimeError: outside of ``with``, without gradients, on a model whose forward
                pass the recorder can't see, or before the step that a restart was to begin with or
                that was recorded last.
        """
        step, loss = whole("step", step, 0), _number(loss)
        self._check_step(step)
        self._stop_watching()
        try:
            self._proxy.calls += 1
            with torch.no_grad():
                self._take(step, loss)
            if self._saved(step):
                self._records.save_model(self.model, step)
            self._follow(step)
            self._saw = False
            if self._saved(step + 1):
                self.flush()
        finally:
            self._watch_step()

    def run(self) -> GradientRun:
        """Return what was recorded so far."""
        return self._records.run()

    # One step ----------------------------------------------------------------------------------

    def _check_step(self, step: int) -> None:
        if not self._open:
            raise TangentRuntimeError(
                "the recorder is not watching: use it as `with GradientRecorder(...) as recorder:`"
            )
        if self._next is not None and step < self._next:
            raise TangentRuntimeError(
                f"this is step {step}, but the records in the folder go on at step {self._next}: "
                f"to go on from a checkpoint, give start={step} when the recorder is made, which "
                f"drops what was recorded from step {step} on; for a new run, name another folder"
            )
        last = self._records.last_step
        if step < last:
            raise TangentRuntimeError(
                f"step {step} comes behind step {last}, whose records it would mix with: count the "
                "steps through all epochs, and to go back to a checkpoint make the recorder anew "
                f"with start={step}"
            )
        self._next = None
        if self._looked and not (self._saw if self._meter else self._proxy.fitters):
            self._blind()

    def _blind(self) -> None:
        """No training pass was seen where one was looked for."""
        said = (
            "no activations [batch, pos, d] of a pass with gradients were seen in this step. The "
            "recorder's hooks lie on the modules of the model that it was given: enter it before "
            "the forward pass, and where torch.compile runs another copy, record it uncompiled"
        )
        if self._meter is None:
            raise TangentRuntimeError(f"{said}. Q_T can't be fitted without activations.")
        if not self._told_blind:
            warnings.warn(f"{said}. Activations are not recorded.", stacklevel=4)
            self._told_blind = True

    def _take(self, step: int, loss: float | None) -> None:
        if self._meter is None:
            return
        energies, totals = self._meter.take()
        if not bool(totals[:, 0].isfinite().all()):
            self._records.overflowed(step)
            return
        kinds = totals.shape[1] if self._measured["nulls"] else 1
        shares = {site: share.cpu() for site, share in self._shares.items()}
        self._records.add(Step(step, loss, energies[:, :kinds], totals[:, :kinds], shares))

    def _follow(self, step: int) -> None:
        """Fit Q_T again where the proxy asks for it."""
        if self._proxy.due(step):
            fitted = self._proxy.fit(step, name_of(self.model))
            self._records.hold(self._hold(fitted))
            self._records.refitted(step, fitted)

    def _hold(self, subspaces: Mapping[str, TangentSubspace]) -> tuple[Label, ...]:
        """Hold gradients against these from now on; returns what each weight is compared with."""
        self._subspaces = SubspaceSet({site: subspaces[site] for site in subspaces})
        self._meter = GradientMeter(self.weights, self._subspaces, **self._measured)
        return self._meter.labels

    # Watching ----------------------------------------------------------------------------------

    def _watch_step(self) -> None:
        """Place the hooks that the coming step needs."""
        self._shares, self._saw, self._looked = {}, False, self._proxy.looks
        contexts: list[Any] = [nullcontext()]  # a step may be watched by no hook
        if self._meter is not None:
            contexts.append(self._meter.watching(None))
        if self._looked:
            contexts.append(watching_activations(self.weights.sites, self._look))
        for context in contexts:
            context.__enter__()
            self._open.append(context)

    def _stop_watching(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _look(self, site: str, x: Tensor) -> None:
        """Take in the activations of a forward pass: for a fit, and their share in Q_T."""
        if not torch.is_grad_enabled():
            return  # not the training pass: a validation loss within the step
        self._saw = True
        if x.ndim != 3:
            return  # no positions to choose from
        if not bool(x.isfinite().all()):
            return  # an overflow, of the gradients too: the loss scale may be lowered for the next
        rows = self._proxy.take_in(site, x)
        if self._meter is not None:
            spread = self._meter.reduce(site, rows).spread
            self._shares[site] = self._shares.get(site, 0) + spread  # of all parts of the batch


def _predicate(
    save_at: Iterable[int] | Callable[[int], bool],
    out: str | os.PathLike[str] | None,
    model: nn.Module,
) -> Callable[[int], bool]:
    """Turn steps into a predicate, and refuse what could not be saved when its step comes."""
    if not callable(save_at):
        given = list(save_at) if isinstance(save_at, Iterable) else save_at
        if given == []:
            return lambda _: False
        save_at = frozenset(wholes("save_at", given)).__contains__
    if out is None:
        raise TangentValueError("save_at needs a folder to save to: give out=")
    if not hasattr(getattr(model, "module", model), "save_pretrained"):
        raise TangentValueError(
            f"save_at saves by save_pretrained, which a {type(model).__name__} has not: save it "
            "in the loop, and call recorder.flush() behind that"
        )
    return save_at


def _step(name: str, given: int | None) -> int | None:
    return None if given is None else whole(name, given, 0)


def _number(loss: Tensor | float | None) -> float | None:
    try:
        return None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f" {loss!r}"
        raise TangentValueError(
            f"the loss is a {type(loss).__name__}{shape}: give one number, such as loss.mean()"
        ) from error


def _ranks(meter: GradientMeter) -> int | list[int]:
    """The rank of subspaces that were given, or all where they differ."""
    ranks = sorted({label.rank for label in meter.labels})
    return ranks[0] if len(ranks) == 1 else ranks


def _fingerprint(meter: GradientMeter) -> str:
    """Of all subspaces that were given."""
    return sha256("".join(label.compared for label in meter.labels).encode()).hexdigest()[:16]
