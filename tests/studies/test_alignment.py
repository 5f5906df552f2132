"""The alignment test against runs that are solved in closed form, and its tables."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from tests.studies.runs import (
    ALL_POINTS,
    SMALL,
    FlowCheckpoint,
    flow_series,
    tokens,
    unrelated,
    write_run,
)
from tl_tangent.analysis.gradients.gradient_energy import gradient_energy
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.gradient_flow import crossing_time, energy_ratio_at
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.checkpoints import CheckpointSeries

FLOW = {
    "rank": FlowCheckpoint.rank,
    "kinds": ("q",),
    "positions": "all",
    "n_controls": 3,
    "moments": False,
}
HALVES = {"tangent_variance": 0.5, "normal_variance": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def series(folder):
    return CheckpointSeries.from_folder(folder)


@pytest.fixture(scope="module")
def found(series):
    return alignment_test(series, tokens(), **SMALL)


@pytest.fixture(scope="module")
def flow():
    return alignment_test(flow_series(), ALL_POINTS, **FLOW)


@pytest.fixture(scope="module")
def errors():
    """Norms of W(0) - W* in Q_T and beside it."""
    start = FlowCheckpoint("", 0, flow=(0.5, 0.05)).load()
    apart = start.layers[0].q_proj.weight.detach() - start.teacher
    rank = FlowCheckpoint.rank
    parts = {"tangent_error": apart[:, :rank], "normal_error": apart[:, rank:]}
    return {name: float(part.norm()) for name, part in parts.items()}


class TestClosedForms:
    """Gradient flow of a linear regression, through all of the pipeline."""

    def test_every_checkpoint_has_the_ratio_of_its_time(self, flow, errors):
        share = FlowCheckpoint.d / FlowCheckpoint.rank - 1  # directions beside Q_T for each in it
        for row in flow.checkpoints.to_dict("records"):
            expected = share * energy_ratio_at(row["step"], **HALVES, **errors)
            assert row["energy_ratio_exact"] == pytest.approx(expected, rel=1e-4)

    def test_early_exceeds_one_and_late_does_not(self, flow, errors):
        """The logarithm of the ratio is linear in time: its mean is that of the mean time."""
        row = flow.table().iloc[0]
        share = FlowCheckpoint.d / FlowCheckpoint.rank - 1
        early, late = sum(range(7)) / 7, sum(range(7, 21)) / 14
        assert (row.checkpoints_early, row.checkpoints_late) == (7, 14)
        assert early < crossing_time(**HALVES, **errors) < late
        for phase, time_ in (("early", early), ("late", late)):
            expected = share * energy_ratio_at(time_, **HALVES, **errors)
            assert row[f"energy_ratio_exact_{phase}"] == pytest.approx(expected, rel=1e-4)
        assert row.energy_ratio_exact_early > 1 > row.energy_ratio_exact_late
        assert row.energy_ratio_early > 1 > row.energy_ratio_late
        assert row.p_value_early == 1 / 4 and row.p_value_late == 1
        assert "early exceeds late: a factor of" in flow.headline()

    def test_pooled_energies_are_geometric_sums(self, flow, errors):
        """Without controls in it, ``sum E_T / sum E_N`` over steps a, ..., b - 1."""

        def energy(variance, error, a, b):
            return sum((variance * error) ** 2 * math.exp(-2 * variance * s) for s in range(a, b))

        measured = flow.models[0]
        for phase, a, b in (("early", 0, 7), ("late", 7, 21)):
            tangent = energy(0.5, errors["tangent_error"], a, b)
            normal = energy(0.05, errors["normal_error"], a, b)
            sums = [one.statistics for one in measured.of_phase(phase)]
            inside = sum(float(one.energies[0, 0, 0]) for one in sums)
            whole = sum(float(one.totals[0, 0]) for one in sums)
            assert inside / (whole - inside) == pytest.approx(tangent / normal, rel=1e-4)

    def test_the_gradient_exceeds_what_is_mechanical_where_error_lies(self, flow):
        """At the start g = (W - W*) x follows x: the ratio is the square of the activations'."""
        first = flow.checkpoints.iloc[0]
        assert first.activation_ratio == pytest.approx(0.5 / 0.05, rel=1e-6)
        assert first.energy_ratio_exact / first.activation_ratio > 5
        assert first.excess_pairing > 5

    def test_a_gradient_that_follows_nothing_has_an_excess_of_one(self):
        """Pairs drawn at random: energy rests on the activations alone (20 checkpoints).

        The logarithm of a ratio of chi squares with 4 * 32 and 8 * 32 degrees of freedom has the
        standard deviation 0.15, its mean over the early 7 one of 0.06, over the late 14 of 0.04.
        """
        found = alignment_test(flow_series(objective=unrelated), ALL_POINTS, **FLOW)
        row = found.table().iloc[0]
        for phase, tolerance in (("early", 0.24), ("late", 0.16)):
            assert abs(math.log(row[f"excess_pairing_{phase}"])) < tolerance
            assert row[f"energy_ratio_exact_{phase}"] > 7  # of the 10 of the activations


class TestTables:
    def test_a_checkpoint_is_what_gradient_energy_finds(self, series, found):
        for checkpoint in (series.checkpoints[0], series.checkpoints[3]):
            alone = gradient_energy(
                checkpoint.load(),
                tokens(),
                found.models[0].subspaces,
                kinds=("q", "out"),
                n_controls=4,
                moments=True,
            ).to_dataframe()
            rows = found.checkpoints[found.checkpoints["step"] == checkpoint.step]
            numbers = alone.select_dtypes("number").columns
            assert len(numbers) > 15 and list(rows["weight"]) == list(alone["weight"])
            pd.testing.assert_frame_equal(
                rows[numbers].reset_index(drop=True), alone[numbers], rtol=1e-5
            )

    def test_the_table_holds_means_over_weights_and_checkpoints(self, found):
        frame = found.checkpoints
        assert len(frame) == 4 * 4 and list(frame.step.unique()) == [0, 1, 10, 40]
        row = found.table().iloc[0]
        for phase, own in frame.groupby("phase"):
            for name in ("energy_ratio", "energy_ratio_exact", "pairing_ratio", "excess_pairing"):
                expected = math.exp(own[name].map(math.log).mean())
                assert row[f"{name}_{phase}"] == pytest.approx(expected, rel=1e-12)
            for name in ("delta_tangent", "delta_normal"):
                assert row[f"{name}_{phase}"] == pytest.approx(own[name].mean(), rel=1e-12)
            assert row[f"pairs_{phase}"] == len(own)
        assert row.pairs_early == 3 * 4 and row.weights == 4

    def test_by_kind_and_side_each_weight_counts_once(self, found):
        whole = found.table().iloc[0]
        for by in ("kind", "side", "layer", "weight"):
            parts = found.table(by)
            assert parts["weights"].sum() == 4
            logs = parts["energy_ratio_early"].map(math.log) * parts["pairs_early"]
            mean = math.exp(logs.sum() / parts["pairs_early"].sum())
            assert whole.energy_ratio_early == pytest.approx(mean, rel=1e-12)
        assert list(found.table("kind")["kind"]) == ["q", "out"]
        assert set(found.table("side")["side"]) == {"input", "output"}

    def test_checkpoints_can_be_grouped(self, found):
        steps = found.to_dataframe("checkpoint")
        assert list(steps.step) == [0, 1, 10, 40] and list(steps.phase) == ["early"] * 3 + ["late"]
        assert steps.loss.gt(0).all() and len(found.to_dataframe("kind")) == 8
        with pytest.raises(TangentValueError, match="'phase'"):
            found.to_dataframe("phase")
        with pytest.raises(TangentValueError, match="'step'"):
            found.table("step")

    def test_conventions_can_be_kept_as_json(self, found, series):
        told = json.loads(json.dumps(found.conventions))
        assert told["settings"]["rank"] == 2 and told["settings"]["boundary"] == 0.3
        own = told["models"]["tiny"]
        assert own["phases"] == ["early"] * 3 + ["late"] and own["batches"]["tokens"] == 90
        assert [one["step"] for one in own["checkpoints"]] == list(series.steps)
        subspace = found.models[0].subspaces["blocks.0.attn.hook_in"]
        assert subspace.metadata["centering"] == "group"
        assert subspace.metadata["steps"] == [0, 1, 10] and subspace.n_tokens == 3 * 81

    def test_the_headline_takes_the_lead_apart(self, found):
        row, told = found.table().iloc[0], found.headline()
        early, late = row.energy_ratio_exact_early, row.energy_ratio_exact_late
        verb = "exceeds" if early > late else "does not exceed"
        lead = row.pairing_ratio_early / row.pairing_ratio_late
        left = row.excess_pairing_early / row.excess_pairing_late
        assert f"early {early:.3g} (3 checkpoints) / late {late:.3g} (1 checkpoint)" in told
        null = f"{row.pairing_ratio_early:.3g} / {row.pairing_ratio_late:.3g}"
        assert f"of which paired at random {null}; early {verb} late" in told
        factors = f"a factor of {early / late:.3g} = {lead:.3g} of the null x {left:.3g} of the"
        assert factors in told and early / late == pytest.approx(lead * left)
        assert row.lead_excess == pytest.approx(left)
        assert math.isnan(row.lead_excess_low)  # four weights are too few for an interval
        assert "<table" in found._repr_html_() and "tiny" in repr(found)

    def test_what_is_told_multiplies_where_some_weights_have_no_null(self, tmp_path):
        series = CheckpointSeries.from_folder(write_run(tmp_path, (0, 9), "gpt2"))
        found = alignment_test(series, tokens(), **{**SMALL, "kinds": ("q", "pos")})
        row, told = found.table().iloc[0], found.headline()
        assert (row.weights, row.weights_paired) == (3, 2)
        for phase in ("early", "late"):
            product = row[f"pairing_ratio_{phase}"] * row[f"excess_pairing_{phase}"]
            assert row[f"energy_ratio_paired_{phase}"] == pytest.approx(product)
            assert row[f"energy_ratio_paired_{phase}"] != row[f"energy_ratio_exact_{phase}"]
            assert f"{phase} {row[f'energy_ratio_paired_{phase}']:.3g} (" in told
        assert "(over the 2 of 3 weights that have this null)" in told

    def test_the_headline_says_what_a_gradient_is_of_and_what_q_t_has_seen(self, series, found):
        assert "One gradient is of 30 tokens" in found.headline()
        assert "fitted on the same tokens (in-sample)" in found.headline()
        for n, word in ((2, "on 3 of these 9 rows too (partly in-sample)"), (3, "on other tokens")):
            own = {"fit_batches": tokens(5)[n:], "moments": False}
            told = alignment_test(series, tokens(), **{**SMALL, **own}).headline()
            assert f"Q_T was fitted {word}" in told

    def test_files(self, found, tmp_path):
        paths = found.save(tmp_path / "out", "the command")
        assert [path.name for path in paths] == [
            "table.csv",
            "checkpoints.csv",
            "curve.png",
            "align.json",
        ]
        table = pd.read_csv(paths[0])
        assert list(table.columns[:3]) == ["model", "kind", "side"] and len(table) == 1 + 2 + 2
        assert table.energy_ratio_early[0] == found.table().energy_ratio_early[0]
        assert len(pd.read_csv(paths[1])) == 16
        assert paths[2].read_bytes().startswith(b"\x89PNG")
        assert json.loads(paths[3].read_text())["headline"] == found.headline()

    def test_the_figure_has_a_place_for_step_0_and_a_column_a_model(self, found):
        frame = found.to_dataframe("checkpoint")
        other = frame.assign(model="other", step=frame.step + 5)
        from tl_tangent.views.alignment_figure import draw_alignment

        figure = draw_alignment(pd.concat([frame, other]))
        axes = [ax for ax in figure.axes if ax.get_title()]
        assert [ax.get_title() for ax in axes] == ["tiny", "other"]
        for ax in axes:
            assert ax.get_xscale() == "symlog" and len(ax.lines) == 3
        assert list(axes[0].lines[0].get_xdata()) == [0, 1, 10, 40]
        told = [text.get_text() for text in axes[0].get_legend().get_texts()]
        assert told == ["measured", "paired at random"]
        figure.canvas.draw()

    @pytest.mark.parametrize(
        ("within", "label", "words"),
        [
            ("token", "paired among equal input tokens", "among equal input tokens only, the"),
            ("shuffled", "paired in groups of their sizes", "in groups of the sizes of those of"),
        ],
    )
    def test_the_null_within_groups_has_a_line_and_a_sentence(self, series, within, label, words):
        found = alignment_test(series, tokens(1), **SMALL, within=within)
        ratios, excess = found.plot().axes[:2]
        told = [text.get_text() for text in ratios.get_legend().get_texts()]
        assert told == ["measured", "paired at random", label]
        frame, row = found.to_dataframe("checkpoint"), found.table().iloc[0]
        for ax, i, name in ((ratios, 2, "within_token_ratio"), (excess, 1, "excess_within_token")):
            assert list(ax.lines[i].get_ydata()) == list(frame[name])
        both = f"{row.excess_within_token_early:.3g} / {row.excess_within_token_late:.3g}"
        assert words in found.headline() and f"the excess is {both}" in found.headline()
