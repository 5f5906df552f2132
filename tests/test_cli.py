"""The command line on a tiny local model: files, resuming, and errors in one line."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from tests import families
from tests.analysis.test_layer_ablation import a_result
from tl_tangent import SubspaceSet
from tl_tangent.cli import main
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.run_folder import RunFolder
from tl_tangent.views.layer_figure import draw_layers
from tl_tangent.views.table import format_table

FILES = {"layers.csv", "layers.png", "subspaces.safetensors", "report.json"}
SMALL = [
    "--rank",
    "2",
    "--controls",
    "2",
    "--tokens",
    "24",
    "--fit-tokens",
    "96",
    "--seq-len",
    "12",
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A folder with a tiny Llama and its tokenizer, and a text of its words."""
    folder = tmp_path_factory.mktemp("tiny")
    families.hf_model("llama").save_pretrained(folder / "model")
    families.tiny_tokenizer(folder).save_pretrained(folder / "model")
    ids = families.tiny_tokens(batch=1, pos=400)[0].tolist()
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in ids), encoding="utf-8")
    return folder


def report(paths, out, *extra: str) -> int:
    where = ["--model", str(paths / "model"), "--text", str(paths / "text.txt"), "--out", str(out)]
    return main(["report", *where, *SMALL, "--no-progress", *extra])


def test_report_writes_its_files_and_prints_its_finding(paths, tmp_path, capsys):
    assert report(paths, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    frame = pd.read_csv(tmp_path / "out/layers.csv")
    told = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= FILES
    assert list(frame["layer"]) == [0, 1]
    assert told["headline"] in printed and "control" in printed
    assert told["command"].startswith("tl-tangent report --model")
    assert told["conventions"]["fit_rows"] == 8
    assert (tmp_path / "out/layers.png").read_bytes().startswith(b"\x89PNG")
    subspaces = SubspaceSet.load(tmp_path / "out/subspaces.safetensors")
    assert [subspace.rank for subspace in subspaces.values()] == [2, 2]


def test_report_writes_a_page_whose_heads_are_fitted_once(paths, tmp_path, capsys):
    assert report(paths, tmp_path / "out", "--html") == 0
    assert "report.html" in capsys.readouterr().out
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    for part in ("What cutting Q_T costs", "Attention heads, split", "Tokens by their normal"):
        assert f"<h2>{part}" in page
    assert page.count("data-head=") == 2 * 4 and "Left out" not in page
    assert "tl-tangent report --model" in page
    kept = tmp_path / "out/attention.safetensors"
    before = kept.stat().st_mtime_ns
    assert report(paths, tmp_path / "out", "--html") == 0
    assert kept.stat().st_mtime_ns == before


def test_what_a_page_can_not_show_is_said(paths, tmp_path):
    assert report(paths, tmp_path, "--html", "--sites", "blocks.*.hook_mlp_out") == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Attention heads, split" in page and "residual stream in Q_T" not in page


def test_the_same_command_gives_the_same_table_bit_for_bit(paths, tmp_path):
    tables = []
    for name in ("a", "b"):
        report(paths, tmp_path / name)
        tables.append((tmp_path / name / "layers.csv").read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.skipif(not families.HOOKED_FAMILIES, reason="compares the two classes")
def test_both_classes_print_the_same_table(paths, tmp_path, capsys):
    printed = []
    for name, extra in (("hooked", ()), ("bridge", ("--bridge",))):
        report(paths, tmp_path / name, *extra)
        printed.append(capsys.readouterr().out)
    assert "TangentHookedTransformer" in printed[0] and "TangentBridge" in printed[1]
    bodies = [text.split("\n\n")[1] for text in printed]
    assert "-----" in bodies[0] and bodies[0] == bodies[1]


def test_an_interrupted_run_goes_on_where_it_stood(paths, tmp_path, monkeypatch, capsys):
    report(paths, tmp_path / "whole")
    finish = RunFolder.finish

    def finish_then_stop(folder, piece):
        finish(folder, piece)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", finish_then_stop)
    assert report(paths, tmp_path / "out") == 130
    assert "goes on with what is finished" in capsys.readouterr().err
    assert not (tmp_path / "out/layers.csv").exists()
    measured = []
    monkeypatch.setattr(
        RunFolder,
        "finish",
        lambda folder, piece: measured.append(piece["site"]) or finish(folder, piece),
    )
    monkeypatch.setattr("tl_tangent.report.fit_sites", None)  # the fit is on disk, too
    assert report(paths, tmp_path / "out") == 0
    assert measured == ["blocks.1.hook_resid_post"]
    assert "1 of 2 sites" in capsys.readouterr().err
    tables = [(tmp_path / name / "layers.csv").read_bytes() for name in ("whole", "out")]
    assert tables[0] == tables[1]


def test_another_configuration_in_the_same_folder_is_an_error(paths, tmp_path, capsys):
    report(paths, tmp_path / "out")
    capsys.readouterr()
    assert report(paths, tmp_path / "out", "--seed", "1", "--rank", "3") == 2
    error = capsys.readouterr().err
    assert "rank was 2 and is now 3; seed was 0 and is now 1" in error


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model", "no/such/folder/anywhere"], "no/such/folder/anywhere"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--sites", "blocks.*.hook_resid_pst"], "hook_resid_post"),
        (["--layers", "7"], "layers 0 to 1"),
        (["--rank", "20"], "2 * rank"),
        (["--positions", "most"], "'most'"),
        (["--seq-len", "64"], "2 to 32"),
        (["--tokens", "9000"], "9000|pass a longer text"),
        (["--device", "nowhere"], "nowhere"),
        (["--controls", "0"], "n_controls=0"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_status_2(paths, tmp_path, capsys, extra, message):
    assert report(paths, tmp_path / "out", *extra) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("tl-tangent: error: ")
    assert any(part in error for part in message.split("|"))


def test_rows_that_begin_with_a_repeated_token_are_left_out(paths, tmp_path, capsys):
    words = (paths / "text.txt").read_text(encoding="utf-8").split()
    repeated = sum(words[i] == words[i + 1] for i in range(0, len(words) - 12, 12))
    words[13] = words[12]
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    report(paths, tmp_path / "out", "--text", str(tmp_path / "text.txt"))
    assert f"{repeated + 1} rows that begin with a repeated token" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra", [["--dtype", "bfloat16"], ["--method", "kmeans"], ["--rank", "0.5"]]
)
def test_other_ways_to_fit(paths, tmp_path, extra):
    assert report(paths, tmp_path / "out", *extra) == 0
    assert pd.read_csv(tmp_path / "out/layers.csv")["variance_share"].between(0, 1).all()


def test_positions_and_layers_are_read_from_the_command_line(paths, tmp_path):
    report(paths, tmp_path / "out", "--positions", "2,3", "--layers", "1")
    made = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))["conventions"]
    assert (made["positions"], made["layers"]) == ([2, 3], [1])


def test_a_line_that_was_cut_off_is_not_finished(tmp_path):
    folder = RunFolder(tmp_path, {"a": 1})
    folder.finish({"site": "x"})
    with (tmp_path / "finished.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"site": "y')
    again = RunFolder(tmp_path, {"a": 1})
    assert again.finished() == [{"site": "x"}]
    again.finish({"site": "z"})
    assert again.finished() == [{"site": "x"}, {"site": "z"}]


@pytest.mark.parametrize("line", [b'{"site": "y', b"\x00\x00", b"[1]", b"3", b"", b'{"other": 1}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line):
    folder = RunFolder(tmp_path, {"a": 1})
    folder.finish({"site": "x"})
    with (tmp_path / "finished.jsonl").open("ab") as stream:
        stream.write(line + b"\n")
    folder.finish({"site": "z"})
    with pytest.raises(TangentFileError, match=f"line 2 of {tmp_path}/finished.jsonl is damaged"):
        folder.finished("site")


def test_a_file_that_fails_halfway_leaves_the_old_one(tmp_path):
    folder = RunFolder(tmp_path, {})
    folder.write_text("table", "old")

    def fail(path):
        path.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        folder.write("table", fail)
    assert (tmp_path / "table").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"configuration.json", "table"}


def test_the_folder_says_which_nested_value_differs(tmp_path):
    RunFolder(tmp_path, {"text": {"sha256": "a", "name": "n"}, "seed": 0})
    with pytest.raises(
        TangentValueError, match=r"another configuration: text\.sha256 was 'a' and is"
    ):
        RunFolder(tmp_path, {"text": {"sha256": "b", "name": "n"}, "seed": 0})


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TangentFileError, match="can't be used as a folder"):
        RunFolder(tmp_path / "file", {})


def test_the_table_is_aligned_and_told_by_layer():
    lines = format_table(a_result([0.5, 0.99]).to_dataframe()).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert lines[3].split()[0] == "0" and "+0.500" in lines[3]


def test_the_figure_needs_no_display_and_shows_the_control(tmp_path):
    figure = draw_layers(a_result([0.5, 0.99, 0.7]).to_dataframe(), title="made-up")
    figure.savefig(tmp_path / "figure.png")
    losses, shares, isoscores = figure.axes
    assert losses.get_yscale() == "symlog"
    assert any("matched random" in text.get_text() for text in losses.get_legend().get_texts())
    assert len(losses.collections) == 1  # the band of the controls
    assert [label.get_text() for label in isoscores.get_xticklabels()] == ["0", "1", "2"]
    assert shares.get_ylim()[1] > 1


@pytest.mark.parametrize("steps, warmup", [(500, 40), (80, 40), (40, 20), (2, 1)])
def test_a_short_study_warms_up_for_half_of_it_at_most(steps, warmup, tmp_path, monkeypatch):
    asked = []

    def stopped(out, options, **_):
        asked.append(options)
        raise TangentFileError("no study")

    monkeypatch.setattr("tl_tangent.studies.small_study.small_study", stopped)
    assert main(["study", "--steps", str(steps), "--out", str(tmp_path)]) != 0
    assert [(one.steps, one.warmup) for one in asked] == [(steps, warmup)]
