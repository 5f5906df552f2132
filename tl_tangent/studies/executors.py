"""Run pieces of work in this process, in local ones, or on a cluster, whoever it belongs to.

A script that uses local processes is read once more by each of them. What it does, and calls the
study, belongs under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from tqdm import tqdm

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.studies.main_guard import ADVICE, check_main_guard

TRIES = 3
IN_FLIGHT = 64  # pieces that a cluster is given ahead
POLL = 0.05  # seconds between looks at what is done
LEAVING = 5  # seconds that a process has to end
# how executors tell that a worker is gone; by name, so that none of their packages is imported
LOST = {
    "BrokenExecutor",  # concurrent.futures
    "KilledWorker",  # dask, after it has tried on several workers itself
    "CancelledError",  # dask, when its scheduler forgot the piece
    "UncompletedJobError",  # submitit; what a job raised is its subclass FailedJobError
}
RAISED = {"FailedJobError"}


class Here:
    """An executor that computes in this process, when it is asked."""

    def submit(self, function: Callable[[Any], Any], piece: Any) -> Future:
        """Compute at once, and return it as a future."""
        future: Future = Future()
        try:
            future.set_result(function(piece))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass
class _Attempt:
    """A piece on its way, and how often a worker was lost over it."""

    piece: Any
    lost: int = 0


class Runner:
    """Runs pieces on an executor until all are done.

    Args:
        executor: None for this process; a number of local processes, which are started afresh (a
            script needs ``if __name__ == "__main__":`` for them); or any object whose
            ``submit(function, piece)`` returns something with ``done()`` and ``result()``: an
            executor of :mod:`concurrent.futures`, dask's ``client.get_executor()``, or one of
            submitit's.

    Raises:
        TangentValueError: none of these.
    """

    def __init__(self, executor: Any = None) -> None:
        self.n_workers: int | None = None
        self._executor: Any = Here() if executor is None else executor
        if isinstance(executor, int) and not isinstance(executor, bool):
            if executor < 1:
                raise TangentValueError(f"executor={executor}: give 1 process or more, or None")
            self.n_workers, self._executor = executor, None
        elif executor is not None and not callable(getattr(executor, "submit", None)):
            raise TangentValueError(
                f"executor is a {type(executor).__name__}; accepted are None, a number of "
                "processes, or an executor with submit(function, piece): of concurrent.futures, "
                "dask's client.get_executor(), or submitit's"
            )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        if self.n_workers is not None:
            self._stop_pool()

    @property
    def _advice(self) -> str:
        return "" if self.n_workers is None else f"Or else: {ADVICE}. "

    @property
    def _ahead(self) -> int:
        return 1 if isinstance(self._executor, Here) else self.n_workers or IN_FLIGHT

    def run(
        self,
        function: Callable[[Any], Any],
        pieces: Iterable[Any],
        receive: Callable[[Any, Any], Iterable[Any]],
        *,
        total: int | None = None,
        label: str = "pieces",
        kept: object = None,
        progress: bool = False,
    ) -> None:
        """Compute ``function(piece)`` for all pieces, and take the outcomes as they come.

        A piece whose worker was killed is tried again, in fresh processes where they are own ones.

        Args:
            function: importable by its name where other processes compute.
            pieces: that can be pickled; ``str(piece)`` names one.
            receive: called here with a piece and its outcome; returns pieces that follow, next.
            total: how many there will be, for the progress bar.
            label: of that bar.
            kept: where outcomes are kept, for the message of an error.
            progress: show the bar, with the time that is left.

        Raises:
            TangentRuntimeError: the worker of one piece was lost three times, or local processes
                are started by a script without ``if __name__ == "__main__":``.
            Exception: whatever ``function`` raises, at once.
        """
        waiting = deque(_Attempt(piece) for piece in pieces)
        running: dict[Any, tuple[_Attempt, Any]] = {}
        done, total = 0, total or len(waiting)
        try:
            with tqdm(total=total, desc=label, disable=not progress) as bar:
                while waiting or running:
                    while waiting and len(running) < self._ahead:
                        self._hand_in(function, waiting.popleft(), running)
                    for future in self._finished(running):
                        attempt, executor = running.pop(future)
                        try:
                            outcome = future.result()
                        except Exception as error:
                            self._lost(attempt, executor, error, f"{done} of {total}", kept)
                            waiting.appendleft(attempt)
                        else:
                            done += 1
                            following = [*map(_Attempt, receive(attempt.piece, outcome))]
                            waiting.extendleft(reversed(following))
                            bar.update()
        finally:
            for future in running:
                future.cancel()

    @staticmethod
    def _finished(running: Iterable[Any]) -> list[Any]:
        """Wait until something is finished."""
        while not (found := [future for future in running if future.done()]):
            time.sleep(POLL)
        return found

    def _hand_in(
        self, function: Callable[[Any], Any], attempt: _Attempt, running: dict[Any, Any]
    ) -> None:
        """Submit one piece, and note which executor has it."""
        if self._executor is None:
            assert self.n_workers is not None
            check_main_guard()
            self._executor = ProcessPoolExecutor(
                self.n_workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=signal.signal,  # an interrupt ends workers without a traceback
                initargs=(signal.SIGINT, signal.SIG_DFL),
            )
        try:
            future = self._executor.submit(function, attempt.piece)
        except Exception as error:
            if not _is_lost(error):
                raise
            future = Future()  # the pool broke since it was last looked at
            future.set_exception(error)
        running[future] = attempt, self._executor

    def _lost(
        self, attempt: _Attempt, executor: Any, error: Exception, done: str, kept: object
    ) -> None:
        """Note that a worker was lost over a piece, and leave its pool if it is an own one.

        Raises:
            TangentRuntimeError: it is not the first time.
            Exception: ``error``, if that is what the piece itself raised.
        """
        if not _is_lost(error):
            raise error
        attempt.lost += 1
        if attempt.lost >= TRIES:
            after = "give out= a folder and they are kept"
            if kept is not None:
                after = f"they are in {kept}, and the same command goes on with them"
            reason = (str(error).strip().splitlines() or [""])[0]
            raise TangentRuntimeError(
                f"the worker of {attempt.piece} was lost {attempt.lost} times "
                f"({type(error).__name__}: {reason}). It may need more memory: run fewer workers, "
                f"or fewer batches a piece. {self._advice}{done} pieces are finished: {after}."
            ) from error
        if self.n_workers is not None and executor is self._executor:
            self._stop_pool()

    def _stop_pool(self) -> None:
        """Leave the own pool, whatever it is at; the next piece starts another."""
        pool, self._executor = self._executor, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())  # from Python 3.14: terminate_workers()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(LEAVING)


def _is_lost(error: Exception) -> bool:
    """Whether this tells of a worker that is gone, and not of what the piece raised itself."""
    names = {one.__name__ for one in type(error).__mro__}
    return bool(names & LOST) and not names & RAISED


@cache
def leave_with_parent() -> None:
    """End this process when the one that started it is gone.

    The workers of a ProcessPoolExecutor would otherwise wait for ever for a parent that was killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()


def _leave_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
