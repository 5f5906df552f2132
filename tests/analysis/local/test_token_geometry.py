"""Around token types: planted manifolds, flat clouds, and numbers computed by hand"""

from __future__ import annotations

import functools
import math

import pandas as pd
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.local.planted import FIRST, SITE, D, a_model, planted, randn, rows_of
from tl_tangent.analysis.local.token_words import MEANING
from tl_tangent.geometry.dimension import two_nn
from tl_tangent.geometry.manifolds import Gaussian, Linear, Paraboloid, Sphere, sample

SADDLE, NOISY, SPHERE, WIDE, THIN, TAILS, FLAT = range(10, 17)
N = 400


def clouds():
    curved = Paraboloid((1.5, -0.5))
    tails = randn(N, 4, seed=7).norm(dim=1, keepdim=True)  # of Student's t on 4 degrees of freedom
    stretch = torch.tensor([3.0, 3.0] + [0.3] * (D - 2)).double()
    return {
        SADDLE: sample(curved, Gaussian(0.03), N, d=D, seed=1).x,
        NOISY: sample(curved, Gaussian(0.1), N, d=D, noise=0.002, seed=2).x,
        SPHERE: sample(Sphere(2, 1.0), Gaussian(0.03), N, d=D, seed=3).x,
        WIDE: sample(Sphere(2, 1.0), Gaussian(0.4), N, d=D, seed=3).x,
        THIN: sample(Linear(2), Gaussian(1.0), N, d=D, noise=0.05, seed=4).x,
        TAILS: randn(N, D, seed=8) * stretch / tails,
        FLAT: sample(Linear(2), Gaussian(1.0), N, d=D, seed=5).x,
    }


@functools.cache
def known():
    """All of them as token types of one model, by id."""
    model, own = a_model(), clouds()
    tokens = rows_of(dict.fromkeys(own, N))
    with planted(model, tokens, own):
        found = tt.token_geometry(model, tokens, list(own), SITE, slow_controls=1)
    return found, found.to_dataframe().set_index("token_id")


class TestKnownClouds:
    def test_on_curved_manifolds_the_order_is_one_and_the_form_is_theirs(self):
        _, frame = known()
        for token, (square, scalar) in {SADDLE: (2.5, -1.5), SPHERE: (2.0, 2.0)}.items():
            row = frame.loc[token]
            assert row["slope"] == pytest.approx(1, abs=0.15)
            assert row["slope_low"] - 0.1 < 1 < row["slope_high"] + 0.1
            assert row["control_slope_max"] < -0.5
            assert row["normal_slope"] == pytest.approx(2, abs=0.2)
            assert row["normal_slope_low"] < 2 < row["normal_slope_high"] + 0.01
            assert row["control_normal_slope_max"] < 0.5
            assert row["control_random_normal_slope_max"] < 0.6
            assert row["normal_slope_p_gaussian"] == row["normal_slope_p_random"] == 1 / 21
            assert row["form_square"] == pytest.approx(square, rel=0.06)
            assert row["scalar"] == pytest.approx(scalar, rel=0.06)
            assert row["visible"]
        noisy = frame.loc[NOISY]
        assert noisy["visible"]
        assert noisy["form_square"] == pytest.approx(2.5, abs=0.3)
        assert abs(noisy["scalar"] + 1.5) < 3 * noisy["scalar_error"] < 0.4

    def test_eta_is_the_moment_ratio(self):
        """m s^2 for a Gaussian density, less what the mean takes and more of higher orders"""
        _, frame = known()
        for token, eta in {SADDLE: 0.0018, SPHERE: 0.0018, FLAT: 2.0}.items():
            row = frame.loc[token]
            assert abs(row["eta"] - eta) < 3 * row["eta_error"] + eta**2 * (token != FLAT)

    def test_visibility_is_eta_times_the_range_of_the_profile(self):
        """b' of a surface runs over (k1 - k2)^2 / 8 between the axes and halfway."""
        _, frame = known()
        saddle = frame.loc[SADDLE]
        angle = torch.linspace(0, math.pi, 1001, dtype=torch.float64)
        c, s = angle.cos().square(), angle.sin().square()
        profile = (2.25 * c + 0.25 * s) / 2 - (1.5 * c - 0.5 * s).square() / 2
        spread = float(profile.max() - profile.min())
        assert saddle["visibility"] == pytest.approx(saddle["eta"] * spread, rel=0.06)
        assert frame.loc[SPHERE, "visibility"] < 0.1 * saddle["visibility"]

    def test_no_curvature_is_seen_where_there_is_none(self):
        _, frame = known()
        assert frame.loc[[THIN, TAILS, FLAT], "visible"].eq(False).all()
        thin = frame.loc[THIN]
        assert thin["slope"] == pytest.approx(-1, abs=0.2)
        assert thin["control_slope_min"] <= thin["slope"] <= thin["control_slope_max"]
        assert thin["normal_slope_low"] < 0 < thin["normal_slope_high"]
        assert min(thin["normal_slope_p_gaussian"], thin["normal_slope_p_random"]) > 0.1
        assert abs(thin["scalar"]) < 4 * thin["scalar_error"]

    def test_heavy_tails_beat_the_gaussian_null_and_not_the_flipped_one(self):
        """Sizes of both parts go together: more slope than any Gaussian, without curvature."""
        _, frame = known()
        tails = frame.loc[TAILS]
        assert tails["slope"] > tails["control_slope_max"]
        assert tails["slope_p"] == pytest.approx(1 / 21)
        assert tails["form_p_permuted"] < 0.06 < 0.2 < tails["form_p_flipped"]
        assert tails["normal_slope_p_gaussian"] == pytest.approx(1 / 21)
        assert tails["normal_slope_p_random"] > 0.2

    def test_a_plane_has_no_order_and_says_so(self):
        _, frame = known()
        flat = frame.loc[FLAT]
        assert math.isnan(flat["slope"]) and math.isnan(flat["slope_p"])
        assert math.isnan(flat["normal_slope"]) and math.isnan(flat["normal_slope_p_random"])
        assert "normal part is rounding in 8 of 8 bins" in flat["note"]
        assert flat["tangent_share"] == pytest.approx(1) and flat["form_square"] < 1e-12

    def test_dimension_of_a_surface_is_below_that_of_its_covariance(self):
        """The covariance of a bent surface has three directions in use, the surface two."""
        _, frame = known()
        wide = frame.loc[WIDE]
        assert wide["levina_bickel"] == pytest.approx(2.1, abs=0.2)
        assert wide["control_levina_bickel_min"] > wide["levina_bickel"] + 0.3
        flat = frame.loc[FLAT]
        near = flat["control_levina_bickel_mean"]
        assert flat["levina_bickel"] == pytest.approx(near, abs=0.15)

    def test_what_it_says(self):
        found, frame = known()
        assert "visible beyond every null for 4 of 7 types; by chance" in found.headline()
        assert "would be. Clusters of contexts do that too." in found.headline()
        assert "Gaussian clouds -1." in found.headline()
        assert "random tangents +0." in found.headline()
        assert found.headline() in repr(found) and "<table" in found._repr_html_()
        named = ", ".join(MEANING)
        for column in frame.columns:
            words = column.removeprefix("control_")
            for part in ("_mean", "_min", "_max"):
                words = words.removesuffix(part)
            known_names = ("site", "layer")
            assert words in named or words in known_names, column

    def test_the_centre_as_the_mean_flattens_the_slope(self):
        model, own = a_model(), {SPHERE: clouds()[SPHERE]}
        tokens = rows_of({SPHERE: N})
        with planted(model, tokens, own):
            options = {"dimension_points": 0, "slow_controls": 0}
            found = tt.token_geometry(model, tokens, SPHERE, SITE, centre="mean", **options)
        row = found.to_dataframe().iloc[0]
        assert row["slope"] < 0.5 and row["shift"] == 0
        assert "two_nn" not in row and "control_visibility_mean" not in row


COUNTS = {10: 150, 11: 130, 12: 110, 13: 90, 14: 30}
FAST = {"slow_controls": 0, "dimension_points": 0, "n_controls": 2}


def by_cache(model, tokens, site, token):
    _, cache = model.run_with_cache(tokens, names_filter=site)
    return cache[site].detach()[:, 1:][tokens[:, 1:] == token].double()


class TestAgainstTheCache:
    def test_radius_centre_and_dimension_are_those_of_the_cached_vectors(self):
        model, tokens = a_model(), rows_of(COUNTS)
        sites = ["blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"]
        options = {**FAST, "dimension_points": 500, "slow_controls": 1, "equal_n": False}
        found = tt.token_geometry(model, tokens.split(7), [10, 12], sites, **options)
        frame = found.to_dataframe()
        assert frame["site"].tolist() == [one for one in sites for _ in range(2)]
        assert frame["token_id"].tolist() == [10, 12] * 2 and frame["layer"].tolist() == [
            0,
            0,
            1,
            1,
        ]
        for row in frame.to_dict("records"):
            x = by_cache(model, tokens, row["site"], row["token_id"])
            assert row["n"] == row["count"] == len(x) == COUNTS[row["token_id"]]
            squares = (x - x.mean(0)).square().sum(1)
            assert row["eta"] == pytest.approx(float(squares.sum()) / (len(x) - 1))
            error = float(squares.std()) / len(x) ** 0.5 * len(x) / (len(x) - 1)
            assert row["eta_error"] == pytest.approx(error)
            assert row["centre_norm"] == pytest.approx(float(x.mean(0).norm()))
            assert row["relative_radius"] == pytest.approx(row["eta"] ** 0.5 / row["centre_norm"])
            assert row["two_nn"] == pytest.approx(two_nn(x).mle)
            assert row["frequency"] == pytest.approx(len(x) / tokens[:, 1:].numel())

    def test_half_the_vectors_fit_and_the_other_half_is_measured(self):
        model, tokens = a_model(), rows_of(COUNTS)
        found = tt.token_geometry(model, tokens, 10, SITE, **FAST)
        cloud = found.clouds[SITE, 10]
        assert cloud.reading.form.n == int(cloud.reading.slope.counts.sum()) == 75
        form = cloud.reading.form.second_form
        across = torch.einsum("ijd,dk->ijk", form, cloud.base.tangent)
        torch.testing.assert_close(across, torch.zeros_like(across), atol=1e-9, rtol=0)
        assert "halved at random" in found.conventions["meaning"]["split"]

    def test_a_sample_is_of_the_type_and_does_not_depend_on_the_cut(self):
        model, tokens = a_model(), rows_of(COUNTS)
        options = {**FAST, "max_occurrences": 82}
        whole = tt.token_geometry(model, tokens, [10, 13], SITE, **options).to_dataframe()
        cut = tt.token_geometry(model, tokens.split(3), [10, 13], SITE, **options).to_dataframe()
        other = tt.token_geometry(model, tokens, [10, 13], SITE, seed=1, **options).to_dataframe()
        assert whole["n"].tolist() == cut["n"].tolist() == [82, 82]
        assert whole["count"].tolist() == [150, 90]
        for name in ("eta", "slope", "form_raw"):
            assert whole[name].tolist() == pytest.approx(cut[name].tolist(), rel=1e-6)
            assert whole[name].tolist() != pytest.approx(other[name].tolist(), rel=1e-3)
        x = by_cache(model, tokens, SITE, 10)
        assert whole["eta"][0] == pytest.approx(float(x.T.cov().trace()), rel=0.2)
        assert whole["eta"][0] != pytest.approx(float(x.T.cov().trace()), rel=1e-6)

    def test_occurrences_are_those_of_the_measured_half_around_the_centre(self):
        model, tokens = a_model(), rows_of(COUNTS)
        found = tt.token_geometry(model, tokens, 10, SITE, **FAST)
        frame, base = found.occurrences(SITE, 10), found.clouds[SITE, 10].base
        y = by_cache(model, tokens, SITE, 10) - base.point
        tangent = (y @ base.tangent).norm(dim=1)
        normal = (y.square().sum(1) - tangent.square()).sqrt()
        assert len(frame) == 75
        for row in frame.to_dict("records"):
            i = int((tangent - row["tangent"]).abs().argmin())
            for name, size in (("tangent", tangent), ("normal", normal), ("chord", y.norm(dim=1))):
                assert row[name] == pytest.approx(float(size[i])), name
        logs = torch.tensor(frame[["tangent", "normal"]].to_numpy()).log().T.cov()
        slope = found.to_dataframe()["normal_slope"][0]
        assert slope == pytest.approx(float(logs[0, 1] / logs[0, 0]))
        with pytest.raises(tt.TangentKeyError, match=f"token 11 was not measured .* 10 at {SITE}"):
            found.occurrences(SITE, 11)

    def test_equally_many_vectors_of_each_type(self):
        model, tokens = a_model(), rows_of(COUNTS)
        tokens = torch.cat([tokens, tokens[:3]])  # some contexts twice
        ids = [10, 11, 12, 13]
        even = tt.token_geometry(model, tokens, ids, SITE, **FAST)
        frame = even.to_dataframe()
        fewest = int(frame["distinct"].min())
        assert frame["n"].tolist() == [fewest] * 4 and frame["distinct"].max() > fewest
        assert (frame["count"] - frame["copies"] == frame["distinct"]).all()
        assert "from equally many vectors" in even.headline()
        every = tt.token_geometry(model, tokens, ids, SITE, equal_n=False, **FAST)
        whole = every.to_dataframe()
        assert whole["n"].tolist() == whole["distinct"].tolist() == frame["distinct"].tolist()
        assert "from unequal numbers of vectors" in every.headline()
        least = int(frame["distinct"].argmin())
        assert frame["eta"][least] == whole["eta"][least]
        most = int(frame["distinct"].argmax())
        assert frame["eta"][most] != whole["eta"][most]
        assert frame["eta"][most] == pytest.approx(whole["eta"][most], rel=0.2)

    def test_types_that_cant_be_measured_do_not_shrink_the_others(self):
        model, tokens = a_model(), rows_of({10: 120, 11: 31})
        tokens = torch.cat([tokens, *[tokens[tokens.eq(11).any(1)][:1]] * 50])
        found = tt.token_geometry(model, tokens, [10, 11], SITE, **FAST).to_dataframe()
        assert found["note"][1].endswith("the fit needs 80") and found["n"][0] > found["n"][1]
        assert found["n"][0] == found["distinct"][0]

    def test_equal_seeds_give_equal_tables(self):
        model, tokens = a_model(), rows_of(COUNTS)
        one, two = (tt.token_geometry(model, tokens, 10, SITE).to_dataframe() for _ in range(2))
        pd.testing.assert_frame_equal(one, two, rtol=1e-9)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_never_enters(self, side):
        model, tokens = a_model(), rows_of({10: 90})
        wide = torch.full((len(tokens), 32), 10)
        mask = torch.zeros_like(wide)
        span = slice(12, 32) if side == "left" else slice(0, 20)
        wide[:, span], mask[:, span] = tokens[:, :20], 1
        padded = {"input": wide, "attention_mask": mask}
        repeated = [padded, {"input": tokens.flip(0)[:, :20] + 1}, tokens[:, :20] + 2]
        ids = [10, 11, 12]
        with pytest.raises(tt.TangentValueError, match="token 10 occurs 57 times"):
            tt.token_geometry(model, repeated, ids, SITE, **FAST)
        few = {**FAST, "bins": 3}
        found = tt.token_geometry(model, repeated, ids, SITE, **few).to_dataframe()
        assert found["count"].tolist() == [57, 57, 57]
        alone = tt.token_geometry(model, tokens[:, :20], 10, SITE, **few).to_dataframe()
        assert found["eta"][0] == pytest.approx(alone["eta"][0], rel=1e-5)

    def test_it_keeps_no_more_than_it_was_told_to_and_leaves_no_trace(self, monkeypatch):
        from tl_tangent.analysis.local import vectors

        kept = []
        by_type = vectors._by_type

        def noted(taker, own, n_types):
            kept.append(sum(map(len, taker.taken)))
            return by_type(taker, own, n_types)

        monkeypatch.setattr(vectors, "_by_type", noted)
        model, tokens = a_model(), rows_of(COUNTS)
        names, logits = set(model.__dict__) | set(model.hook_dict), model(tokens)
        with torch.inference_mode():
            tt.token_geometry(model, tokens, [10, 11], max_occurrences=80, **FAST)
        assert kept == [160] * families.N_LAYERS
        assert set(model.__dict__) | set(model.hook_dict) == names
        assert torch.equal(model(tokens), logits)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_bridges_and_batches_that_come_once(family):
    model, tokens = families.bridge(family), rows_of(COUNTS)
    sites = ["blocks.0.hook_resid_post", "blocks.0.hook_mlp_out"]
    options = {**FAST, "equal_n": False}
    found = tt.token_geometry(model, iter(tokens.split(5)), [10, 12], sites, **options)
    for row in found.to_dataframe().to_dict("records"):
        x = by_cache(model, tokens, row["site"], row["token_id"])
        assert row["eta"] == pytest.approx(float(x.T.cov().trace()), rel=1e-5)
        assert row["n"] == COUNTS[row["token_id"]]


class TestTypes:
    def test_rules_go_by_the_counts(self):
        model, tokens = a_model(), rows_of(COUNTS)
        given = {"sites": SITE, **FAST}
        chosen = {
            (rule, n): list(tt.token_geometry(model, tokens, rule, n_types=n, **given).types)
            for rule, n in [("frequent", 2), ("rare", 2), ("spread", 3), ("bands", 3)]
        }
        assert chosen == {
            ("frequent", 2): [10, 11],
            ("rare", 2): [12, 13],  # 14 has fewer than the fit needs
            ("spread", 3): [10, 12, 13],
            ("bands", 3): [10, 11, 13],
        }
        with pytest.raises(tt.TangentValueError, match="4 token types have the 80 occurrences"):
            tt.token_geometry(model, tokens, "frequent", n_types=5, **given)

    def test_strings_are_tokens_of_the_tokenizer(self, tmp_path):
        tokenizer = families.tiny_tokenizer(tmp_path)
        build = families.hooked_transformer if families.HAS_HOOKED_TRANSFORMER else families.bridge
        family = "rotary_gqa" if families.HAS_HOOKED_TRANSFORMER else "llama"
        model = build(family, tokenizer=tokenizer)
        text = ["w5 w9 w5 w7 w9 w6 w5 w8 w5"] * 12 + ["w9 w5 w6 w5 w5 w8 w7 w5"] * 10
        few = {**FAST, "bins": 3}
        found = tt.token_geometry(model, [text], ["w5", 9], SITE, **few)
        told = [(kind.id, kind.text, kind.count) for kind in found.types.values()]
        assert told == [(5, "w5", 12 * 4 + 10 * 4), (9, "w9", 12 * 2 + 10)]
        frame = found.to_dataframe()
        assert frame["distinct"].tolist() == [4 + 4, 2 + 1]  # two texts, many times
        with pytest.raises(tt.TangentValueError, match="'w5 w6' is 2 tokens"):
            tt.token_geometry(model, [text], "w5 w6", SITE)

    def test_copies_of_one_context_are_no_points(self):
        model, tokens = a_model(), rows_of({10: 31}).repeat(10, 1)
        found = tt.token_geometry(model, tokens, 10, SITE, **FAST)
        row = found.to_dataframe().iloc[0]
        assert (row["count"], row["n"], row["copies"]) == (310, 31, 279)
        assert row["note"] == "31 distinct of 310 vectors, and the fit needs 80"
        assert math.isnan(row["slope"]) and math.isnan(row["form_square"])
        assert "No controls were drawn for 0 types (1 could not be measured)" in found.headline()


def test_without_controls_and_in_one_dimension():
    model, tokens = a_model(), rows_of(COUNTS)
    bare = tt.token_geometry(model, tokens, 10, SITE, n_controls=0, dimension_points=0)
    row = bare.to_dataframe().iloc[0]
    assert "visible" not in row and "control_slope_mean" not in row and row["slope_p"] is None
    assert "No controls were drawn for 1 types." in bare.headline()
    line = tt.token_geometry(model, tokens, 10, SITE, rank=1, **FAST).to_dataframe().iloc[0]
    assert "directions" not in line and line["visibility"] == pytest.approx(0, abs=1e-9)


class TestRefusals:
    MODEL, TOKENS = a_model(), rows_of(COUNTS)

    @pytest.mark.parametrize(
        "tokens, options, message",
        [
            (49, {}, "token 49 never occurs at the chosen positions"),
            (10**6, {}, "token 1000000 never occurs"),
            (FIRST, {}, "token 50 never occurs"),
            (14, {}, "token 14 occurs 30 times, and the fit needs 80, half of them"),
            (10, {"rank": 12, "max_occurrences": 100}, "less than the 184 that a fit of rank 12"),
            (10, {"rank": 12}, "token 10 occurs 150 times, and the fit needs 184"),
            (10, {"rank": D}, "rank=32 leaves no normal part at blocks.1.hook_resid_pre"),
            (10, {"rank": 0}, "rank is 0"),
            (10, {"bins": 2}, "bins is 2"),
            (10, {"level": 1.0}, r"a level in \(0, 1\), got 1.0"),
            (10, {"centre": "origin"}, "centre is 'fitted' or 'mean', got 'origin'"),
            (10, {"k": 80}, "k=80 neighbours take more than 80 points"),
            (10, {"seed": -1}, "seed is -1"),
            (10, {"positions": [40]}, "position 40 is outside"),
            ("w5", {}, "no tokenizer to find 'w5' with"),
            (2.5, {}, "a token is 2.5"),
            ([], {}, "tokens names none"),
            ("rare", {"n_types": 0}, "n_types is 0"),
            (10, {"sites": "blocks.0.attn.hook_z"}, "not one vector a token"),
        ],
    )
    def test_says_what_is_wrong(self, tokens, options, message):
        options = {"sites": SITE, **options}
        with pytest.raises(tt.TangentValueError, match=message):
            tt.token_geometry(self.MODEL, self.TOKENS, tokens, **options)
        assert not any(key.startswith("_tangent") for key in self.MODEL.__dict__)

    def test_inputs(self):
        with pytest.raises(tt.TangentValueError, match="no token counts under these positions"):
            tt.token_geometry(self.MODEL, [], 10, SITE)
        with pytest.raises(tt.TangentValueError, match="a batch of embeddings has no token types"):
            tt.token_geometry(self.MODEL, torch.zeros(2, 3, D), 10, SITE)
        with pytest.raises(tt.TangentValueError, match="the input is text and this model has no"):
            tt.token_geometry(self.MODEL, ["w5"], 10, SITE)
        for wrong, message in {
            64: r"in \[0, 64\), got 64 to 64",
            -1: "got -1 to -1",
        }.items():
            with pytest.raises(tt.TangentValueError, match=message):
                tt.token_geometry(self.MODEL, torch.full((2, 3), wrong), 10, SITE)
        with pytest.raises(tt.TangentValueError, match="so no tokens: leave it out"):
            tt.token_geometry(self.MODEL, [*self.TOKENS[None], self.TOKENS[:0]], 10, SITE)
        with pytest.raises(tt.TangentValueError, match=r"tokens are \[batch, pos\], got \[1, "):
            tt.token_geometry(self.MODEL, self.TOKENS[None], 10, SITE)
        with pytest.raises(tt.TangentKeyError, match="hook_nowhere"):
            tt.token_geometry(self.MODEL, self.TOKENS, 10, "blocks.0.hook_nowhere")
