"""``tl-tangent align`` on tiny runs: files, tables, interruption, and errors in one line."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests import families
from tests.studies.runs import write_run
from tl_tangent.cli import main, parser
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.align_run import AlignOptions, run_align, series_of, text_batches
from tl_tangent.studies.alignment_result import FILES
from tl_tangent.studies.alignment_words import cautions

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--rank", "2", "--controls", "3", "--tokens", "60", "--seq-len", "12", "--kinds", "q"]
N_PIECES = 3 + 4 + 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A folder with a run, whose last checkpoint has a tokenizer, and a text of its words."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "tiny")
    families.tiny_tokenizer(folder).save_pretrained(folder / "tiny" / "step-40")
    ids = families.tiny_tokens(batch=1, pos=100)[0].tolist()
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in ids), encoding="utf-8")
    return folder


def command(paths, out, *extra: str) -> list[str]:
    where = ["--folder", str(paths / "tiny"), "--text", str(paths / "text.txt"), "--out", str(out)]
    return ["align", *where, *SMALL, *extra]


def align(paths, out, *extra: str) -> int:
    return main(command(paths, out, "--no-progress", *extra))


@pytest.fixture(scope="module")
def whole(paths, tmp_path_factory):
    """The results of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert align(paths, out) == 0
    return out


def test_it_writes_its_files_and_prints_its_tables(paths, whole, tmp_path, capsys):
    assert align(paths, whole) == 0  # all is there: only the files are written again
    printed = capsys.readouterr().out
    told = json.loads((whole / "align.json").read_text(encoding="utf-8"))
    table = pd.read_csv(whole / "table.csv")
    assert {path.name for path in whole.iterdir()} >= set(FILES)
    assert printed.startswith(told["headline"]) and f"Written to {whole}: table.csv" in printed
    assert told["command"].startswith("tl-tangent align --folder")
    assert told["conventions"]["models"]["tiny"]["batches"]["tokens"] == 60
    for name in ("energy_ratio_early", "excess_pairing_late", "delta_p_value_late"):
        assert f"{name}" in printed and f"{table[name][0]:.4g}" in printed
    assert len(pd.read_csv(whole / "checkpoints.csv")) == 4 * 2


def test_an_interrupted_run_goes_on_by_the_same_command(
    paths, whole, tmp_path, monkeypatch, capsys
):
    finish, done = RunFolder.finish, []

    def finish_then_stop(folder, piece):
        finish(folder, piece)
        done.append(piece["piece"])
        if len(done) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", finish_then_stop)
    assert align(paths, tmp_path) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "table.csv").exists()
    assert align(paths, tmp_path) == 0
    assert len(done) == len(set(done)) == N_PIECES
    for name in ("table.csv", "checkpoints.csv"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_an_interrupt_ends_the_workers_too_and_quietly(paths, whole, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [sys.executable, "-m", "tl_tangent.cli", *command(paths, tmp_path, "--workers", "1")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell starts in its background ignores interrupts, and so would this process
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    notes = tmp_path / "tiny" / "finished.jsonl"
    while run.poll() is None and not (tmp_path / "tiny" / "fit.safetensors").exists():
        time.sleep(0.01)  # the worker starts now, which takes it longer than all the pieces do
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)  # to the parent alone, as a notebook or a scheduler does
    error = run.communicate(timeout=30)[1]
    assert run.returncode == 130, error
    assert "tiny: activations" in error and "Traceback" not in error
    finished = notes.read_bytes().count(b"\n") if notes.exists() else 0
    assert finished < N_PIECES
    assert align(paths, tmp_path) == 0
    assert (tmp_path / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--folder", "no/such/folder"], "no sub-folders step-N"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--tokens", "9000"], "pass a longer text"),
        (["--seq-len", "64"], "tiny takes rows of 2 to 32"),
        (["--rank", "17"], "2 * 17 > 32"),
        (["--boundary", "1"], "no checkpoint is late"),
        (["--layers", "7"], "layers [7]"),
        (["--objective", "masked"], "no mask token"),
        (["--workers", "0"], "executor=0"),
        (["--thin", "1"], "n=1"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_status_2(paths, tmp_path, capsys, extra, message):
    assert align(paths, tmp_path / "out", *extra) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("tl-tangent: error: ") and message in error


def test_checkpoints_must_be_named_and_have_a_tokenizer(tmp_path, capsys):
    assert main(["align", "--out", str(tmp_path / "out")]) == 2
    assert "give --folder or --hub" in capsys.readouterr().err
    write_run(tmp_path / "bare", (0, 9))
    assert main(["align", "--folder", str(tmp_path / "bare"), "--out", str(tmp_path / "out")]) == 2
    assert "step 9 " in (error := capsys.readouterr().err) and "has no tokenizer" in error


def test_runs_in_folders_of_one_name_are_told_apart_and_need_no_tokenizer(paths, tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name / "checkpoints", (0, 9), "llama" if name == "a" else "gpt2")
    inside = ["--folder", *(str(tmp_path / name / "checkpoints") for name in "ab")]
    named = ["--tokenizer", str(paths / "tiny" / "step-40")]
    assert align(paths, tmp_path / "out", *inside, *named) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert list(table["model"].unique()) == ["a/checkpoints", "b/checkpoints"]
    above = ["--folder", str(tmp_path / "a"), str(tmp_path / "b")]
    assert align(paths, tmp_path / "above", *above, *named) == 0
    capsys.readouterr()
    other = pd.read_csv(tmp_path / "above" / "table.csv")
    assert list(other["model"].unique()) == ["a", "b"]
    pd.testing.assert_frame_equal(other.drop(columns="model"), table.drop(columns="model"))
    assert align(paths, tmp_path / "none", *above) == 2
    assert "has no tokenizer" in (error := capsys.readouterr().err) and "--tokenizer" in error
    assert align(paths, tmp_path / "none", *above, "--tokenizer", str(tmp_path / "gone")) == 2
    assert f"{tmp_path / 'gone'} has no tokenizer" in capsys.readouterr().err


def test_losses_that_give_reason_to_doubt_are_a_warning(paths, whole, capsys):
    assert align(paths, whole) == 0
    error, losses = capsys.readouterr().err, pd.read_csv(whole / "checkpoints.csv")
    late = losses.loc[losses["phase"] == "late", "loss"].mean()
    assert late > math.log(64)
    assert f"tl-tangent: warning: the mean loss of tiny late, {late:.3g} nats a token, is" in error
    assert "above the 4.16 of a blind guess among 64 token ids" in error
    assert json.loads((whole / "align.json").read_text())["cautions"][0] in error


def test_losses_that_fall_below_a_guess_give_none():
    told = {"objective": "causal", "vocabulary": 64}
    assert cautions("x", {"early": 4.0, "late": 3.9}, told) == []
    assert len(cautions("x", {"early": 4.3, "late": 4.2}, told)) == 1
    (rise,) = cautions("x", {"early": 3.9, "late": 4.0}, told)
    assert "the mean loss of x rises from 3.9 early to 4 late" in rise
    assert cautions("x", {"early": 4.3, "late": 4.2}, told | {"objective": "f, code 1"}) == []
    assert cautions("x", {"early": 4.3, "late": 4.2}, told | {"vocabulary": None}) == []


def test_folders_and_repositories_are_read_alike(paths):
    given = ["--hub", "a/one", "b/two", "--revisions", "step1", "step9", "--dtype", "bfloat16"]
    options = vars(parser().parse_args(["align", *given, "--folder", str(paths / "tiny")]))
    names = ("folder", "hub", "revisions", "dtype")
    found = series_of(AlignOptions(Path("out"), thin=2, **{name: options[name] for name in names}))
    assert [one.name for one in found] == ["tiny", "a/one", "b/two"]
    assert [one.steps for one in found] == [(0, 40), (1, 9), (1, 9)]
    assert {one.dtype for series in found for one in series.checkpoints} == {"bfloat16"}


def test_options_take_paths_and_one_folder_alone(paths, whole, tmp_path):
    wanted = pd.read_csv(whole / "table.csv")
    sizes = {"tokens": 60, "seq_len": 12, "rank": 2, "controls": 3, "kinds": ("q",)}
    for folder in ([paths / "tiny"], paths / "tiny", str(paths / "tiny")):
        out = str(tmp_path / "out")
        run_align(AlignOptions(out, folder, text=paths / "text.txt", progress=False, **sizes))
        pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out" / "table.csv"), wanted)


def test_an_encoder_gets_its_first_token_and_its_masks(tmp_path):
    from transformers import BertTokenizer

    write_run(tmp_path / "bert", (0, 1), "bert")
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(5, 64))]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizer(vocab=str(vocabulary)).save_pretrained(tmp_path / "bert" / "step-1")
    options = AlignOptions(
        tmp_path, (str(tmp_path / "bert"),), objective="masked", tokens=96, seq_len=12, batch=3
    )
    (series,) = series_of(options)
    text = " ".join(f"w{5 + i % 59}" for i in range(200))
    batches = text_batches(series, text, options)
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    assert tokens.shape == (8, 12) and [len(batch.tokens) for batch in batches] == [3, 3, 2]
    assert (tokens[:, 0] == 1).all() and (labels[:, 0] == -100).all()
    hidden = [batch.labels != -100 for batch in batches[:2]]
    assert (tokens == 4).any() and not torch.equal(*hidden)  # drawn anew for each batch
    again = text_batches(series, text, options)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))
