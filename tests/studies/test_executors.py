"""Pieces run anywhere, their outcomes arrive once each, and lost workers are replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.studies import jobs
from tests.studies.runs import LastFirst
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.studies.executors import Runner

ROOT = Path(__file__).resolve().parents[2]
SQUARES = {x: x * x for x in range(8)}


def outcomes(runner, function=jobs.square, pieces=tuple(SQUARES), **options):
    found = []

    def receive(piece, outcome):
        found.append((piece[0] if isinstance(piece, tuple) else piece, outcome))
        return ()

    runner.run(function, pieces, receive, **options)
    return found


@pytest.mark.parametrize("make", [lambda: None, LastFirst, lambda: ThreadPoolExecutor(2)])
def test_every_piece_is_computed_once(make):
    found = outcomes(Runner(make()))
    assert len(found) == len(SQUARES) and dict(found) == SQUARES
    if isinstance(make(), LastFirst):
        assert [piece for piece, _ in found] == list(SQUARES)[::-1]


def test_what_follows_from_a_piece_comes_next():
    done = []

    def receive(piece, outcome):
        done.append(outcome)
        return [outcome] if outcome < 100 else ()

    Runner().run(jobs.square, [2, 3], receive)
    assert done == [4, 16, 256, 9, 81, 6561]


def test_local_processes_are_kept_between_runs_and_replaced_when_one_is_killed(tmp_path):
    pieces = [(x, str(tmp_path)) for x in SQUARES]
    with Runner(2) as runner:
        assert dict(outcomes(runner)) == SQUARES
        pool = runner._executor
        assert dict(outcomes(runner)) == SQUARES and runner._executor is pool
        found = outcomes(runner, jobs.die_once, pieces)
        assert (tmp_path / "died").exists() and runner._executor is not pool
    assert len(found) == len(SQUARES) and dict(found) == SQUARES
    assert runner._executor is None


def test_a_piece_that_kills_every_worker_is_named_with_what_is_finished(tmp_path):
    with Runner(1) as runner, pytest.raises(TangentRuntimeError) as caught:
        outcomes(runner, jobs.die_at_3, kept=tmp_path)
    message = str(caught.value)
    assert "the worker of 3 was lost 3 times (BrokenProcessPool" in message
    assert f"3 of 8 pieces are finished: they are in {tmp_path}, and the same command" in message
    with Runner(1) as runner, pytest.raises(TangentRuntimeError, match="give out= a folder"):
        outcomes(runner, jobs.die_at_3, [3])


@pytest.mark.parametrize("executor", [None, 1])
def test_what_a_piece_raises_is_raised_at_once(executor):
    with Runner(executor) as runner, pytest.raises(ZeroDivisionError, match="piece 5"):
        outcomes(runner, jobs.fail, [5, 6])


def test_an_error_cancels_what_waits():
    pool, started = ThreadPoolExecutor(1), []

    def work(x):
        started.append(x)
        time.sleep(0.1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outcomes(Runner(pool), work)
    pool.shutdown()
    assert len(started) < len(SQUARES)


def test_local_processes_are_stopped_in_the_middle_of_a_piece():
    def stop(piece, outcome):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Runner(2) as runner:
        runner.run(jobs.nap, [60, 0], stop)
    assert not multiprocessing.active_children()


def test_the_bar_shows_pieces_and_the_time_that_is_left(capsys):
    outcomes(Runner(), jobs.slow_square, (1, 2), total=2, label="squares", progress=True)
    shown = capsys.readouterr().err
    assert "squares: 100%" in shown and "2/2" in shown and "00:0" in shown
    outcomes(Runner())
    assert not capsys.readouterr().err


@pytest.mark.parametrize("executor", [0, -2, True, "dask", 1.5])
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(TangentValueError, match="executor"):
        Runner(executor)


def test_a_dask_cluster_that_loses_a_worker(tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs the extra 'studies'")
    pieces = [(x, str(tmp_path)) for x in SQUARES]
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = outcomes(Runner(client.get_executor()), jobs.die_once, pieces)
    assert (tmp_path / "died").exists()
    assert len(found) == len(SQUARES) and dict(found) == SQUARES


def test_dask_gives_up_on_a_piece_and_it_is_tried_again(tmp_path):
    """What a cluster raises when it has given up, and what it raises of the piece itself."""
    distributed = pytest.importorskip("distributed", reason="needs the extra 'studies'")
    from distributed.scheduler import KilledWorker

    class GivesUp:
        def __init__(self, times):
            self.left = times

        def submit(self, function, piece):
            future = Future()
            if self.left:
                self.left -= 1
                worker = distributed.scheduler.WorkerState
                future.set_exception(KilledWorker(str(piece), worker, 3))
            else:
                future.set_result(function(piece))
            return future

    assert outcomes(Runner(GivesUp(2)), pieces=[4]) == [(4, 16)]
    with pytest.raises(TangentRuntimeError, match="worker of 4 was lost 3 times .KilledWorker"):
        outcomes(Runner(GivesUp(3)), pieces=[4])


def test_jobs_of_submitit_one_of_which_is_killed(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason="needs the extra 'studies'")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # how long it waits for what a killed job may still have written
    monkeypatch.setattr(submitit.core.core.Job, "_results_timeout_s", 2)
    executor = submitit.LocalExecutor(folder=tmp_path / "logs")
    executor.update_parameters(timeout_min=2)
    pieces = [(x, str(tmp_path)) for x in (2, 3, 4)]
    found = outcomes(Runner(executor), jobs.die_once, pieces)
    assert (tmp_path / "died").exists() and sorted(found) == [(2, 4), (3, 9), (4, 16)]
    with pytest.raises(submitit.core.utils.FailedJobError, match="ZeroDivisionError: piece 5"):
        outcomes(Runner(executor), jobs.fail, [5])


ELSEWHERE, GUARD = "if True:  # no __main__ here", 'if __name__ == "__main__":'


@pytest.mark.parametrize(
    "guard", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in (ELSEWHERE, GUARD))]
)
def test_a_script_without_a_guard_is_told_to_have_one(tmp_path, guard):
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.studies import jobs
        from tl_tangent.studies.executors import Runner
        {guard or "if True:"}
            with Runner(1) as runner:
                runner.run(jobs.square, [3], lambda piece, found: print(found) or ())
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, str(tmp_path / "script.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if guard == GUARD:
        assert (run.returncode, run.stdout) == (0, "9\n")
    else:
        assert run.returncode == 1 and not run.stdout
        last = run.stderr.strip().splitlines()[-1]
        assert last.startswith("tl_tangent.errors.TangentRuntimeError")
        assert 'Put what it does under if __name__ == "__main__":' in last
    if not guard:
        assert "script.py has no guard" in last and run.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_package_that_is_run_needs_no_guard(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.studies import jobs
        from tl_tangent.studies.executors import Runner
        with Runner(1) as runner:
            runner.run(jobs.square, [3], lambda piece, found: print(found) or ())
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "package"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "9\n"), run.stderr


@pytest.mark.slow
def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path):
    note = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import multiprocessing, os, signal, sys
        from concurrent.futures import ProcessPoolExecutor
        sys.path.insert(0, {str(ROOT)!r})
        from tests.studies import jobs
        if __name__ == "__main__":
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            pool.submit(jobs.follow_the_parent, {str(note)!r}).result()
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    (tmp_path / "parent.py").write_text(script)
    run = subprocess.run([sys.executable, tmp_path / "parent.py"], check=False)
    assert run.returncode == -signal.SIGKILL
    worker, end = int(note.read_text()), time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
