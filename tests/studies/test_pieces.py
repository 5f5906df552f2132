"""Each piece leaves what one would measure by hand, and pieces add up to the whole."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from tests.studies.runs import tokens, write_run
from tl_tangent.analysis.gradients.gradient_energy import gradient_energy
from tl_tangent.analysis.gradients.probe import normal_stack
from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.energy import moment_energies
from tl_tangent.geometry.fitter_io import load_fitters, merge_fitters
from tl_tangent.geometry.linalg import on_threads
from tl_tangent.geometry.removal import removal
from tl_tangent.hooks.gradients.objectives import Batch
from tl_tangent.studies.batches import (
    batches_of,
    describe_batches,
    load_batches,
    rows_in_common,
    save_batches,
)
from tl_tangent.studies.checkpoints import CheckpointSeries
from tl_tangent.studies.measured import MeasuredCheckpoint, measured_of
from tl_tangent.studies.pieces import (
    BATCHES,
    FIT,
    SUBSPACES,
    Options,
    Piece,
    Plan,
    gradient_pieces,
    run_piece,
)

RANK, CONTROLS = 3, 4
RANGES = ((0, 2), (2, 3))
OPTIONS = Options(rank=RANK, n_controls=CONTROLS, layers=(0, 1), seed=5)


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Three checkpoints, between which the embedding drifts by far more than tokens differ."""
    return CheckpointSeries.from_folder(
        write_run(tmp_path_factory.mktemp("runs") / "tiny", (0, 3, 9), drift=5.0)
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory, series):
    """A plan whose Q_T is fitted at the first two checkpoints."""
    folder = tmp_path_factory.mktemp("study")
    found = Plan(str(folder), "causal", RANGES, RANGES, OPTIONS)
    for name in (BATCHES, FIT):
        save_batches(folder / name, batches_of(tokens(), series))
    paths = []
    for checkpoint in series.checkpoints[:2]:
        for some in RANGES:
            piece = Piece("activations", checkpoint, some, found)
            told = run_piece(pickle.loads(pickle.dumps(piece)))
            assert set(told) == {"fingerprint", "architecture"}
            paths.append(piece.path)
    fitters = merge_fitters(paths)
    subspaces = {site: one.fit(RANK, site=site) for site, one in fitters.items()}
    SubspaceSet(subspaces).save(folder / SUBSPACES)
    return found


@pytest.fixture(scope="module")
def parts(plan, series):
    """The gradients of the last checkpoint, in two pieces."""
    pieces = gradient_pieces(series.checkpoints[-1], plan)
    for piece in pieces:
        run_piece(piece)
    return pieces


def test_activations_are_pooled_around_the_mean_of_each_checkpoint(plan, series):
    """The first residual stream of a Llama is its embedding, so that the pool is known."""
    options = replace(OPTIONS, kinds=("embed",), layers=None)
    own = replace(plan, options=options)
    paths = []
    for checkpoint in series.checkpoints[:2]:
        for some in RANGES:
            piece = Piece("activations", checkpoint, some, own)
            run_piece(piece)
            paths.append(piece.path)
    subspace = merge_fitters(paths)["blocks.0.hook_resid_pre"].fit(RANK)
    seen = torch.cat([batch[:, 1:].flatten() for batch in tokens()])  # position 0 is left out
    pooled = []
    for checkpoint in series.checkpoints[:2]:
        rows = checkpoint.load().get_input_embeddings().weight.detach()[seen].double()
        pooled.append(rows - rows.mean(0))
    leading = torch.linalg.svd(torch.cat(pooled))[2][:RANK].T
    cosines = torch.linalg.svdvals(leading.T @ subspace.basis.double())
    assert subspace.n_tokens == 2 * len(seen)  # as many rows of each
    assert float(cosines.min()) > 1 - 1e-5  # float32 activations around a mean of 5


def test_a_piece_of_gradients_is_what_gradient_energy_finds(plan, series, parts):
    checkpoint = series.checkpoints[-1]
    subspaces = SubspaceSet.load(f"{plan.folder}/{SUBSPACES}")
    found = gradient_energy(
        checkpoint.load(),
        tokens()[:2],
        subspaces,
        layers=OPTIONS.layers,
        n_controls=CONTROLS,
        seed=OPTIONS.seed,
        moments=True,
    ).statistics
    piece = GradientStatistics.load(parts[0].path)
    assert piece.labels == found.labels and piece.n_tokens == found.n_tokens == 60
    torch.testing.assert_close(piece.energies, found.energies, rtol=1e-6, atol=0, equal_nan=True)
    for name, moment in found.moments.items():
        torch.testing.assert_close(piece.moments[name], moment, rtol=1e-5, atol=1e-9)


def test_pieces_add_up_to_one_of_all_batches(plan, series, parts, tmp_path):
    for name in (BATCHES, SUBSPACES):
        shutil.copy(f"{plan.folder}/{name}", tmp_path)
    own = replace(plan, folder=str(tmp_path), ranges=((0, 3),))
    (whole,) = gradient_pieces(series.checkpoints[-1], own)
    run_piece(whole)
    one = GradientStatistics.load(whole.path)
    two = GradientStatistics.load(parts[0].path) + GradientStatistics.load(parts[1].path)
    assert (one.n_batches, one.n_tokens) == (two.n_batches, two.n_tokens) == (3, 90)
    torch.testing.assert_close(one.energies, two.energies, rtol=1e-6, atol=0, equal_nan=True)


def test_a_checkpoint_is_added_up_and_its_second_moments_are_read_off(plan, parts):
    piece = Piece("checkpoint", parts[0].checkpoint, (0, 3), plan)
    assert run_piece(piece) == {}
    found = MeasuredCheckpoint.load(piece.path, 9)
    sums = [GradientStatistics.load(part.path) for part in parts]
    both = sums[0] + sums[1]
    sums = (found.statistics.energies.nan_to_num(), both.energies.nan_to_num())
    assert torch.equal(*sums) and not found.statistics.moments
    assert found.loss == both.loss / 3
    subspaces = SubspaceSet.load(f"{plan.folder}/{SUBSPACES}")
    stacks = {
        site: normal_stack(site, subspaces[site], CONTROLS, OPTIONS.seed) for site in subspaces
    }
    for i, label in enumerate(both.labels):
        moment, stacked = both.moments[label.name], stacks[label.site]
        # the same normals as in the gradients: the energies of the second moment are theirs
        torch.testing.assert_close(
            moment_energies(moment, stacked, RANK), both.energies[i, 0], rtol=1e-5, atol=1e-12
        )
        effect = removal(moment, stacked, RANK)
        row = found.rows[i]
        assert row["isoscore"] == effect.isoscore and row["delta_p_value"] == effect.p_value
        assert row["delta_tangent"] == effect.delta_tangent
        assert row["delta_normal"] == pytest.approx(sum(effect.delta_normals) / CONTROLS)
        assert 0 < row["efficiency"] <= 1


def test_a_checkpoint_comes_back_from_disk_bit_for_bit(plan, parts, tmp_path):
    sums = [GradientStatistics.load(part.path) for part in parts]
    subspaces = SubspaceSet.load(f"{plan.folder}/{SUBSPACES}")
    found = measured_of(9, sums, subspaces, seed=OPTIONS.seed)
    found.save(tmp_path / "whole")
    back = MeasuredCheckpoint.load(tmp_path / "whole", 9)
    assert back.rows == found.rows and back.loss == found.loss
    bare = measured_of(9, [replace(one, moments={}) for one in sums], subspaces)
    bare.save(tmp_path / "bare")
    back = MeasuredCheckpoint.load(tmp_path / "bare", 9)
    assert back.removals is None and "delta_tangent" not in back.rows[0]


def test_a_piece_appears_whole_and_takes_the_place_of_an_older_one(plan, series, monkeypatch):
    piece = Piece("activations", series.checkpoints[2], (0, 1), plan)
    run_piece(piece)
    before = piece.path.read_bytes()

    def half(path, fitters):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("tl_tangent.studies.pieces.save_fitters", half)
        with pytest.raises(OSError, match="disk full"):
            run_piece(piece)
    assert piece.path.read_bytes() == before
    assert not list(piece.path.parent.glob(".*"))
    piece.path.write_bytes(b"something else")
    run_piece(piece)
    assert load_fitters(piece.path).keys() == SubspaceSet.load(f"{plan.folder}/{SUBSPACES}").keys()


@pytest.mark.parametrize("stage", ["activations", "gradients"])
def test_what_can_not_be_measured_is_told_by_the_first_piece(plan, series, stage):
    piece = Piece(stage, series.checkpoints[0], (0, 1), plan)
    wrong = replace(piece, plan=replace(plan, options=replace(OPTIONS, kinds=("pos",))))
    with pytest.raises(TangentValueError, match=r"kinds \['pos'\]"):
        run_piece(wrong)
    gone = replace(piece, plan=replace(plan, folder=f"{plan.folder}/gone"))
    with pytest.raises(TangentFileError, match="every worker sees"):
        run_piece(gone)


def test_a_rank_without_room_for_normals_is_told_before_anything_is_fitted(plan, series):
    options = replace(OPTIONS, rank=17)
    piece = Piece("activations", series.checkpoints[0], (0, 1), replace(plan, options=options))
    with pytest.raises(TangentValueError, match=r"2 \* 17 > 32"):
        run_piece(piece)


def test_a_piece_runs_on_its_threads_and_gives_them_back():
    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


class TestBatches:
    def test_they_come_back_with_masks_and_labels(self, tmp_path):
        first, second, third = tokens()
        mask = torch.ones_like(second)
        mask[0, 4:] = 0
        given = [first, {"input_ids": second, "attention_mask": mask, "labels": third}]
        found = batches_of(given, None)
        save_batches(tmp_path / "b", found)
        for one, two in zip(found, load_batches(tmp_path / "b", 0, 2), strict=True):
            for name in ("tokens", "mask", "labels"):
                a, b = getattr(one, name), getattr(two, name)
                assert (a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype)
        assert torch.equal(load_batches(tmp_path / "b", 1, 2)[0].tokens, second)

    def test_rows_that_share_their_memory_can_be_saved(self, tmp_path):
        save_batches(tmp_path / "b", batches_of(tokens(1)[0].split(1), None))
        assert len(load_batches(tmp_path / "b", 0, 3)) == 3

    def test_a_checksum_tells_them_apart(self):
        first, second, _ = tokens()
        told = describe_batches([Batch(first), Batch(second)])
        assert (told["batches"], told["tokens"]) == (2, 60)
        others = ([second, first], [first], [first, first])
        for other in others:
            assert describe_batches([Batch(x) for x in other])["sha256"] != told["sha256"]
        labelled = [Batch(first), Batch(second, labels=second)]
        assert describe_batches(labelled)["sha256"] != told["sha256"]

    def test_rows_in_common(self):
        first, second, third = (Batch(one) for one in tokens())
        assert rows_in_common([first, second], [second, third]) == (6, 3)
        assert rows_in_common([first], [second]) == (3, 0)
        assert rows_in_common([first], [Batch(first.tokens[1:].int())]) == (3, 2)

    def test_a_model_can_have_tokens_of_its_own(self, series):
        found = batches_of(lambda one: tokens(len(one.checkpoints)), series)
        assert len(found) == 3

    def test_what_can_not_be_read_is_refused(self, series):
        with pytest.raises(TangentValueError, match="no batches"):
            batches_of([], series)
        with pytest.raises(TangentValueError, match="2 of 3 batches have no labels"):
            first, second, third = tokens()
            labelled = {"input_ids": first, "labels": first}
            batches_of([labelled, second, third], series, "masked")
