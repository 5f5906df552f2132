"""Two processes do not write into one folder, and a dead one holds none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tl_tangent.errors import TangentFileError
from tl_tangent.folder_lock import only_writer

pytest.importorskip("fcntl")
ROOT = Path(__file__).resolve().parents[1]


def test_a_folder_is_held_by_one_process_until_it_is_gone(tmp_path):
    script = f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tl_tangent.folder_lock import only_writer
        with only_writer({str(tmp_path)!r}):
            print("held", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(TangentFileError, match=f"{tmp_path} is being written by another"):
            with only_writer(tmp_path):
                pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with only_writer(tmp_path):
            pass


def test_it_is_given_back_after_an_error_and_while_a_forked_process_lives_on(tmp_path):
    with pytest.raises(ZeroDivisionError), only_writer(tmp_path / "new"):
        raise ZeroDivisionError
    with only_writer(tmp_path / "new"):
        pid = os.fork()
        if pid == 0:
            signal.pause()
    try:
        with only_writer(tmp_path / "new"):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr("tl_tangent.folder_lock.fcntl.flock", refuse)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass


def test_what_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TangentFileError, match="can't be used as a folder"):
        with only_writer(tmp_path / "file"):
            pass
