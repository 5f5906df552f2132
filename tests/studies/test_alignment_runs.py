"""Runs of the alignment test: any order, any interruption, and what it refuses."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests import families
from tests.studies.runs import (
    ALL_POINTS,
    N_PIECES,
    SMALL,
    LastFirst,
    flow_series,
    squared_error,
    tokens,
    write_run,
)
from tl_tangent.errors import TangentFileError, TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.hooks.gradients.objectives import mask_tokens
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.checkpoints import CheckpointSeries

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def series(folder):
    return CheckpointSeries.from_folder(folder)


@pytest.fixture(scope="module")
def found(series):
    return alignment_test(series, tokens(), **SMALL)


def assert_same_tables(a, b):
    for by in ("model", "kind"):
        pd.testing.assert_frame_equal(a.table(by), b.table(by), check_exact=True)
    pd.testing.assert_frame_equal(a.checkpoints, b.checkpoints, check_exact=True)


class TestRuns:
    def test_orders_and_executors_give_the_same_bits(self, series, found):
        shuffled = replace(series, checkpoints=series.checkpoints[::-1])
        assert_same_tables(found, alignment_test(shuffled, tokens(), **SMALL))
        assert_same_tables(found, alignment_test(series, tokens(), **SMALL, executor=LastFirst()))

    def test_a_run_goes_on_after_every_piece_and_repeats_none(
        self, series, found, tmp_path, monkeypatch
    ):
        finish, done = RunFolder.finish, []

        def finish_then_stop(folder, piece):
            finish(folder, piece)
            done.append(piece["piece"])
            raise KeyboardInterrupt

        monkeypatch.setattr(RunFolder, "finish", finish_then_stop)
        for _ in range(N_PIECES):
            with pytest.raises(KeyboardInterrupt):
                alignment_test(series, tokens(), **SMALL, out=tmp_path)
        assert len(set(done)) == len(done) == N_PIECES
        again = alignment_test(series, tokens(), **SMALL, out=tmp_path)
        assert len(done) == N_PIECES
        assert_same_tables(found, again)

    def test_large_files_are_gone_in_the_end_and_early(self, series, tmp_path, monkeypatch):
        finish, most = RunFolder.finish, []

        def look(folder, piece):
            finish(folder, piece)
            most.append(len(list(folder.path.glob("gradients-*"))))

        monkeypatch.setattr(RunFolder, "finish", look)
        alignment_test(series, tokens(), **SMALL, out=tmp_path)
        assert max(most) == 2  # the pieces of one checkpoint
        left = sorted(path.name for path in (tmp_path / "tiny").iterdir())
        assert left == [
            "batches.safetensors",
            *(f"checkpoint-{step:09d}-00000" for step in (0, 1, 10, 40)),
            "checkpoint-files.json",
            "configuration.json",
            "finished.jsonl",
            "fit.safetensors",
            "subspaces.safetensors",
        ]

    def test_a_process_that_was_killed_half_way(self, folder, found, tmp_path):
        script = f"""
            import os, signal, sys
            sys.path.insert(0, {str(ROOT)!r})
            from tests.studies.runs import SMALL, tokens
            from tl_tangent.run_folder import RunFolder
            from tl_tangent.studies.alignment import alignment_test
            from tl_tangent.studies.checkpoints import CheckpointSeries
            finish, finished = RunFolder.finish, []

            def finish_and_die(folder, piece):
                finish(folder, piece)
                finished.append(piece)
                if len(finished) == {N_PIECES // 2}:
                    os.kill(os.getpid(), signal.SIGKILL)

            RunFolder.finish = finish_and_die
            series = CheckpointSeries.from_folder({str(folder)!r})
            alignment_test(series, tokens(), **SMALL, out={str(tmp_path)!r})
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
        notes = tmp_path / "tiny" / "finished.jsonl"
        assert run.returncode == -signal.SIGKILL
        assert notes.read_bytes().count(b"\n") == N_PIECES // 2
        scratch = tmp_path / "tiny" / ".gradients-000000001-00000-0123"
        scratch.write_bytes(b"half")
        again = alignment_test(
            CheckpointSeries.from_folder(folder), tokens(), **SMALL, out=tmp_path
        )
        assert_same_tables(found, again)
        assert not scratch.exists()

    def test_models_with_tokens_of_their_own(self, series, found, tmp_path):
        bert = CheckpointSeries.from_folder(
            write_run(tmp_path / "runs" / "bert", (0, 5), "bert"), objective="masked"
        )
        masked = [mask_tokens(x, mask_token=3, vocabulary=64, seed=1) for x in tokens()]
        both = alignment_test(
            [series, bert],
            lambda one: masked if one.objective == "masked" else tokens(),
            **SMALL,
            out=tmp_path / "out",
        )
        assert list(both.table()["model"]) == ["tiny", "bert"]
        alone = found.table().iloc[0]
        assert both.table().iloc[0].to_dict() == pytest.approx(alone.to_dict(), nan_ok=True)
        assert both.headline().splitlines()[0].startswith("Early exceeds late in ")
        assert len(both.headline().splitlines()) == 3
        with pytest.raises(TangentValueError, match="no labels"):
            alignment_test(bert, tokens(), **SMALL)

    def test_q_t_can_be_fitted_on_other_tokens(self, series, found):
        apart = alignment_test(series, tokens(), fit_batches=tokens(5)[3:], **SMALL)
        told = apart.conventions["models"]["tiny"]
        assert told["fit_batches"] != told["batches"]
        site = "blocks.0.attn.hook_in"
        one, two = (x.models[0].subspaces[site] for x in (found, apart))
        assert not torch.allclose(one.basis, two.basis, atol=1e-3)

    def test_a_generator_is_read_once_and_serves_all_models(self, series, found):
        other = replace(series, name="other")
        stream = (one for one in tokens())
        both = alignment_test([series, other], stream, fit_batches=stream, **SMALL)
        told = both.conventions["models"]
        assert told["tiny"]["batches"] == told["other"]["batches"] == told["other"]["fit_batches"]
        assert both.table().iloc[1].energy_ratio_early == found.table().iloc[0].energy_ratio_early

    def test_without_second_moments_there_is_no_isoscore(self, series):
        found = alignment_test(series, tokens(1), **{**SMALL, "moments": False})
        assert "delta_tangent_early" not in found.table()
        assert "excess_pairing_early" in found.table()


class TestRefusals:
    def test_neighbours_with_the_same_weights(self, series, tmp_path):
        copy = replace(series.checkpoints[1], step=2)
        doubled = replace(series, checkpoints=(*series.checkpoints, copy))
        for _ in range(2):  # and the same command says so again
            with pytest.raises(TangentValueError, match=r"step 1 \(.*step 2 \(.*same weights"):
                alignment_test(doubled, tokens(1), **SMALL, out=tmp_path)
        noted = (tmp_path / "tiny" / "finished.jsonl").read_text().splitlines()
        assert len(noted) == 3  # steps 0, 1 and 2, and nothing more the second time

    def test_a_checkpoint_that_changes_between_two_runs(self, tmp_path, monkeypatch):
        folder = write_run(tmp_path / "runs" / "tiny", (0, 10))
        series = CheckpointSeries.from_folder(folder)
        with monkeypatch.context() as patched:
            patched.setattr("tl_tangent.studies.study.Study._measure", None)
            with pytest.raises(TypeError):
                alignment_test(series, tokens(1), **SMALL, out=tmp_path / "out")
        families.hf_model("llama", seed=5).save_pretrained(folder / "step-0")
        with pytest.raises(TangentFileError, match="step 0 .* has changed since .*safetensors"):
            alignment_test(series, tokens(1), **SMALL, out=tmp_path / "out")
        # nothing is known of the files of a revision: its weights tell
        monkeypatch.setattr("tl_tangent.studies.identity.files_of", lambda checkpoint: {})
        (tmp_path / "out" / "tiny" / "checkpoint-files.json").unlink()
        with pytest.raises(TangentValueError, match="step 0 .* has changed since other pieces"):
            alignment_test(series, tokens(1), **SMALL, out=tmp_path / "out")

    def test_files_that_are_about_other_weights(self, series, tmp_path):
        for name, kinds in (("one", ("q",)), ("two", ("q", "out"))):
            alignment_test(series, tokens(1), **{**SMALL, "kinds": kinds}, out=tmp_path / name)
        place = "tiny/checkpoint-000000010-00000"
        shutil.rmtree(tmp_path / "one" / place)
        shutil.copytree(tmp_path / "two" / place, tmp_path / "one" / place)
        with pytest.raises(
            TangentFileError, match=r"of step 0 \(.* and of step 10 \(.* same weights"
        ):
            alignment_test(series, tokens(1), **{**SMALL, "kinds": ("q",)}, out=tmp_path / "one")

    def test_two_objectives_of_one_name_are_two_studies(self, tmp_path):
        def of(scale):
            def loss(model, batch):
                return scale * squared_error(model, batch)

            return loss

        options = {"rank": 2, "n_controls": 1, "kinds": "q", "positions": "all"}
        for scale in (1.0, 1.0):
            series = flow_series(range(4), of(scale))
            alignment_test(series, ALL_POINTS, **options, out=tmp_path)
        with pytest.raises(TangentValueError, match="objective was .*code.* is now .*code"):
            alignment_test(flow_series(range(4), of(2.0)), ALL_POINTS, **options, out=tmp_path)

    def test_another_test_in_the_same_folder(self, series, tmp_path, monkeypatch):
        monkeypatch.setattr(
            "tl_tangent.studies.alignment.Study.measure",
            lambda self: (SubspaceSet(), ()),
        )
        alignment_test(series, tokens(1), **SMALL, out=tmp_path)
        for changed, message in (
            ({"rank": 3}, "rank was 2 and is now 3"),
            ({"boundary": 0.1}, "boundary was 0.3 and is now 0.1"),
            ({"threads": 2}, "threads was 1 and is now 2"),
        ):
            with pytest.raises(TangentValueError, match=message):
                alignment_test(series, tokens(1), **{**SMALL, **changed}, out=tmp_path)
        with pytest.raises(TangentValueError, match=r"batches.sha256 was"):
            alignment_test(series, tokens(2)[1:], **SMALL, out=tmp_path)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"boundary": 1.0}, "no checkpoint is late"),
            ({"n_controls": 0}, "n_controls=0"),
            ({"threads": 0}, "threads=0"),
            ({"batches_per_piece": 0}, "batches_per_piece=0"),
            ({"method": "dictionary"}, "'dictionary' is not one of pca"),
            ({"rank": 17}, r"2 \* 17 > 32"),
            ({"kinds": ("gat",)}, r"\['gat'\]"),
            ({"executor": "many"}, "executor"),
        ],
    )
    def test_options_that_do_not_fit(self, series, changed, message):
        with pytest.raises(TangentValueError, match=message):
            alignment_test(series, tokens(1), **{**SMALL, **changed})

    @pytest.mark.parametrize(
        "typo",
        [
            {"kinds": ("qu", "out")},
            {"kinds": ("q", "pos")},  # there are such weights, in other models
            {"layers": (2,)},
            {"rank": 0},
            {"rank": 1.5},
            {"rank": "broken-stik"},
            {"rank": 17},
            {"boundary": 1.0},
            {"by": "steps"},
            {"within": "tokens"},
            {"zeta": 2.0},
            {"device": "cudda"},
        ],
    )
    def test_a_typo_leaves_no_folder_that_refuses_the_right_spelling(self, series, tmp_path, typo):
        with pytest.raises(TangentValueError, match=next(iter(typo))):
            alignment_test(series, tokens(1), **{**SMALL, **typo}, out=tmp_path / "out")
        assert not (tmp_path / "out" / "configuration.json").exists()

    def test_a_token_that_the_model_does_not_have(self, series, tmp_path, monkeypatch):
        wrong = [*tokens(1), tokens(1)[0].clone().index_fill(1, torch.tensor([4]), 64)]
        message = "token id 64 in batch 1: the vocabulary of this LlamaForCausalLM has 64 ids"
        with pytest.raises(TangentValueError, match=message):
            alignment_test(series, wrong, **SMALL, out=tmp_path / "out")
        with pytest.raises(TangentValueError, match=message):
            alignment_test(series, tokens(1), fit_batches=wrong, **SMALL, out=tmp_path / "out")
        with pytest.raises(TangentValueError, match="token id -1"):
            alignment_test(series, -tokens(1)[0].clamp(max=1), **SMALL, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        # where nothing is known of a model before it is loaded
        monkeypatch.setattr("tl_tangent.studies.prepared.outline", lambda *_: None)
        with pytest.raises(TangentValueError, match=message):
            alignment_test(series, wrong, **SMALL)

    def test_no_models_or_two_of_one_name(self, series):
        with pytest.raises(TangentValueError, match="no series"):
            alignment_test([], tokens(1))
        with pytest.raises(TangentValueError, match="two series are called tiny"):
            alignment_test([series, replace(series, objective="masked")], tokens(1))
        with pytest.raises(TangentValueError, match="no batches"):
            alignment_test(series, [])

    def test_a_folder_that_is_a_file(self, series, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(TangentFileError, match="can't be used as a folder"):
            alignment_test(series, tokens(1), out=tmp_path / "file")

    def test_a_second_process_in_the_same_folder(self, series, tmp_path, monkeypatch):
        finish, refused = RunFolder.finish, []

        def finish_while_another_starts(folder, piece):
            finish(folder, piece)
            with pytest.raises(TangentFileError, match="is being written by another process") as e:
                alignment_test(series, tokens(1), **SMALL, out=tmp_path)
            refused.append(e)

        monkeypatch.setattr(RunFolder, "finish", finish_while_another_starts)
        alignment_test(series, tokens(1), **SMALL, out=tmp_path)
        assert len(refused) == 3 + 4 + 4

    def test_a_damaged_note_is_named_and_can_be_taken_out(self, series, tmp_path):
        found = alignment_test(series, tokens(1), **SMALL, out=tmp_path)
        notes = tmp_path / "tiny" / "finished.jsonl"
        lines = notes.read_text().splitlines(keepends=True)
        notes.write_text("".join([*lines[:4], lines[4][:20] + "\n", *lines[5:]]))
        with pytest.raises(TangentFileError, match="line 5 of .*tiny/finished.jsonl is damaged"):
            alignment_test(series, tokens(1), **SMALL, out=tmp_path)
        notes.write_text("".join([*lines[:4], *lines[5:]]))
        assert_same_tables(found, alignment_test(series, tokens(1), **SMALL, out=tmp_path))

    def test_a_lost_worker_tells_where_the_rest_is_kept(self, series, tmp_path):
        class Broken:
            def submit(self, function, piece):
                raise type("BrokenExecutor", (Exception,), {})("gone")

        with pytest.raises(
            TangentRuntimeError, match="activations of step 0 .*batches 0 to 0"
        ) as e:
            alignment_test(series, tokens(1), **SMALL, out=tmp_path, executor=Broken())
        assert str(tmp_path / "tiny") in str(e.value)
