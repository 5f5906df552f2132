"""Record gradient energies inside a training loop, step by step, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tl_tangent.analysis.gradients.activations import ActivationMeter, chosen_rows, name_of
from tl_tangent.analysis.gradients.meter import GradientMeter
from tl_tangent.analysis.gradients.passes import check_trainable
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.token_energies import Own
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.watch import watching_activations
from tl_tangent.hooks.gradients.weight import Weights
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions, Run
from tl_tangent.studies.run_records import GradientRun, Records, Step

Proxy = Literal["frozen", "follow", "early"]


class GradientRecorder:
    """Energies of the weight gradients in Q_T and matched normals, at every step of a training.

        with GradientRecorder(model, subspaces, out="runs/a") as recorder:
            for step, batch in enumerate(loader):
                loss = model(**batch).loss
                loss.backward()
                recorder.record(step, loss)
                optimizer.step()
                optimizer.zero_grad()

    ``record`` stands between ``backward`` and the optimizer's step, and reads the gradients that
    lie in the parameters then: accumulated, clipped or scaled as they are, which no ratio notices.
    Nothing is recorded of a step whose gradients are not finite (a mixed-precision overflow), and
    the run says how many. Records reach the disk every ``flush_every`` steps and on leaving.

    Args:
        model: a Hugging Face model, a bridge or a HookedTransformer in training.
        subspaces: Q_T at the site of every weight, for the ``"frozen"`` proxy.
        out: folder of the records; None keeps them in memory.
        proxy: ``"frozen"``: Q_T stays what was given. ``"follow"``: it is fitted again every
            ``refit_every`` steps, on the activations of the steps before. ``"early"``: it follows
            until ``freeze_at`` and stays then, fitted on all activations up to there, those of
            each ``refit_every`` steps around their own mean. The first fit follows the first step,
            which is not recorded itself. A restart goes on with the last fit in ``out``, and with
            the activations behind it: from the step after that fit, all is as it would have been.
        rank, method, positions: of a fit; see :func:`tl_tangent.fit_subspaces`. Positions count
            within a row as the model is given it: padding on the left or in packed rows is not
            known here.
        refit_every, freeze_at: in steps.
        activations_every: activations are looked at in every so many steps, for fits and for their
            own share in Q_T.
        kinds, layers: which weights; all by default.
        n_controls: B, matched random normals at each site.
        nulls: also record what is mechanical; one forward and backward pass a step, then.
        save_at: which steps to save the model at, before their update: steps, or a predicate. They
            go to ``out/checkpoints/step-N`` by ``save_pretrained``.
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
        proxy: Proxy = "frozen",
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
        _check_options(proxy, subspaces, freeze_at, refit_every, activations_every, flush_every)
        chosen = (weights or find_weights(model)).choose(kinds, layers)
        check_trainable(chosen)
        self.model, self.weights, self.proxy = model, chosen, proxy
        self._rank, self._method, self._mask = rank, method, PositionMask(positions)
        self._refit_every, self._freeze_at = refit_every, freeze_at
        self._activations_every = activations_every
        self._options: dict[str, Any] = {"n_controls": n_controls, "seed": seed, "nulls": nulls}
        saved = save_at if callable(save_at) else frozenset(save_at).__contains__
        self._saved: Callable[[int], bool] = saved
        if out is None and not callable(save_at) and list(save_at):
            raise TangentValueError("save_at needs a folder to save to: give out=")
        self._records = Records(out, flush_every, self._told())
        self._subspaces: SubspaceSet | None = None
        self._meter: GradientMeter | None = None
        self._activations: ActivationMeter | None = None
        self._seen: dict[str, Own] = {}
        self._open: list[Any] = []
        self._calls = 0
        held = subspaces if subspaces is not None else self._records.last_fit()
        if held is not None:
            self._hold(held)
        self._go_on()

    def _told(self) -> dict[str, Any]:
        """What the records are about, JSON-able."""
        return {
            "model": name_of(self.model),
            "model_class": type(self.model).__name__,
            "proxy": self.proxy,
            "rank": self._rank,
            "method": self._method,
            "refit_every": self._refit_every,
            "freeze_at": self._freeze_at,
            "activations_every": self._activations_every,
            "positions": self._mask.description,
            "weights": [weight.name for weight in self.weights.weights],
            **self._options,
        }

    def _go_on(self) -> None:
        """Take up the activations that the last fit of an earlier run was made of."""
        fitters = self._records.last_activations()
        if fitters is not None:
            self._activations = self._new_activations()
            self._activations.fitters = fitters
            self._calls = self._records.last_fit_step + 1

    @property
    def subspaces(self) -> SubspaceSet | None:
        """Q_T at every site, as it is now; None before the first fit."""
        return self._subspaces

    # The loop ----------------------------------------------------------------------------------

    def __enter__(self) -> GradientRecorder:
        self._watch_step()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model, and put what is left on disk."""
        self._stop_watching()
        self._records.flush()

    def record(self, step: int, loss: Tensor | float | None = None) -> None:
        """Record the gradients that lie in the parameters, before the optimizer uses them.

        Args:
            step: its number; a step that is recorded again, after a restart, replaces the first.
            loss: kept beside it.

        Raises:
            TangentRuntimeError: outside of ``with``, or without gradients.
        """
        if not self._open:
            raise TangentRuntimeError(
                "the recorder is not watching: use it as `with GradientRecorder(...) as recorder:`"
            )
        self._stop_watching()
        try:
            with torch.no_grad():
                self._take(step, None if loss is None else float(loss))
            if self._saved(step):
                self._records.save_model(self.model, step)
            self._follow(step)
        finally:
            self._watch_step()

    def run(self) -> GradientRun:
        """Return what was recorded so far."""
        self._records.flush()
        return self._records.run()

    # One step ----------------------------------------------------------------------------------

    def _take(self, step: int, loss: float | None) -> None:
        if self._meter is None:
            return
        energies, totals = self._meter.take()
        if not bool(totals[:, 0].isfinite().all()):
            self._records.overflowed(step)
            return
        shares = {site: own.spread.cpu() for site, own in self._seen.items()}
        self._records.add(Step(step, loss, energies, totals, shares))

    def _follow(self, step: int) -> None:
        """Fit Q_T again where the proxy asks for it."""
        if self._stays or self._activations is None:
            return
        first, freeze = self._meter is None, self._freeze_at == step
        if first or freeze or (step + 1) % self._refit_every == 0:
            fitted = self._activations.fit(self._rank, self._method, model=name_of(self.model))
            self._hold(fitted)
            adds = self.proxy == "early" and not freeze
            self._records.refitted(step, fitted, self._activations.fitters if adds else None)
            if not adds:
                self._activations = None

    @property
    def _stays(self) -> bool:
        """Whether Q_T is fitted no more."""
        if self._freeze_at is None:
            return self.proxy == "frozen"
        return self._records.last_fit_step >= self._freeze_at

    def _hold(self, subspaces: Mapping[str, TangentSubspace]) -> None:
        self._subspaces = SubspaceSet({site: subspaces[site] for site in subspaces})
        self._meter = GradientMeter(self.weights, self._subspaces, **self._options)
        self._records.hold(self._meter.labels)

    # Watching ----------------------------------------------------------------------------------

    def _watch_step(self) -> None:
        """Place the hooks that the coming step needs."""
        self._seen = {}
        looks = self._meter is None or self._calls % self._activations_every == 0
        self._calls += 1
        contexts: list[Any] = [_Nothing()]
        if self._meter is not None:
            contexts.append(self._meter.watching(None))
        if looks:
            contexts.append(watching_activations(self.weights.sites, self._look))
        for context in contexts:
            context.__enter__()
            self._open.append(context)

    def _stop_watching(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _new_activations(self) -> ActivationMeter:
        return ActivationMeter(self.weights, positions=self._mask.rule, centering="group")

    def _look(self, site: str, x: Tensor) -> None:
        """Take in the activations of a forward pass: for a fit, and their share in Q_T."""
        if not (torch.is_grad_enabled() and x.ndim == 3):
            return  # not the training pass: a validation loss within the step
        rows = chosen_rows(x, self._mask, Run(length=x.shape[1]))
        if not self._stays:
            if self._activations is None:
                self._activations = self._new_activations()
            group = (self._calls - 1) // self._refit_every  # of the step under way
            self._activations.fitters[site].update(rows, group=group)
        if self._meter is not None:
            self._seen[site] = self._meter.reduce(site, rows)


class _Nothing:
    """Stands for a step that is watched by no hook."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _check_options(
    proxy: str,
    subspaces: Mapping[str, TangentSubspace] | None,
    freeze_at: int | None,
    refit_every: int,
    activations_every: int,
    flush_every: int,
) -> None:
    if proxy not in ("frozen", "follow", "early"):
        raise TangentValueError(f"proxy is 'frozen', 'follow' or 'early', got {proxy!r}")
    if (proxy == "frozen") != (subspaces is not None):
        raise TangentValueError(
            "a frozen proxy is given by subspaces=, one that follows is fitted here: with "
            f"proxy={proxy!r} subspaces are {'missing' if subspaces is None else 'given'}"
        )
    if (proxy == "early") != (freeze_at is not None):
        raise TangentValueError(f"proxy={proxy!r} with freeze_at={freeze_at}: the two go together")
    if min(refit_every, activations_every, flush_every) < 1:
        raise TangentValueError(
            f"refit_every={refit_every}, activations_every={activations_every} and "
            f"flush_every={flush_every} must be 1 or more"
        )
