"""Frequency against spread: against a direct computation, and its nulls where truth is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.analysis.frequency.collecting import collect_types
from tl_tangent.analysis.frequency.sources import read_counts, token_counts, word_frequencies
from tl_tangent.analysis.frequency.token_rows import TokenRows
from tl_tangent.hooks.positions import PositionMask

SITE = "blocks.1.hook_resid_post"
MODELS = [("bridge", "gpt2"), ("bridge", "llama"), ("bridge", "bert")]
if families.HAS_HOOKED_TRANSFORMER:
    MODELS.append(("hooked", "rotary_gqa"))


def build(kind: str, family: str):
    return families.hooked_transformer(family) if kind == "hooked" else families.bridge(family)


def batches(n: int = 3, *, padding: str | None = None):
    found = []
    for seed in range(n):
        tokens = families.tiny_tokens(batch=4, pos=12, seed=seed)
        mask = torch.ones_like(tokens)
        if padding == "right":
            mask[1, 8:] = 0
        elif padding == "left":
            mask[1, :4] = 0
        found.append({"input": tokens, "attention_mask": mask} if padding else tokens)
    return found


def directly(model, data, site):
    """The vectors of every token id at the positions behind the first real one."""
    found: dict[int, list] = {}
    for batch in data:
        tokens = batch["input"] if isinstance(batch, dict) else batch
        mask = batch["attention_mask"] if isinstance(batch, dict) else torch.ones_like(tokens)
        options = {"attention_mask": mask} if isinstance(batch, dict) else {}
        _, cache = model.run_with_cache(tokens, names_filter=site, **options)
        for row, x in enumerate(cache[site]):
            real = mask[row].nonzero().flatten().tolist()
            for pos in real[1:]:
                found.setdefault(int(tokens[row, pos]), []).append(x[pos].double())
    return {token: torch.stack(rows) for token, rows in found.items() if len(rows) > 1}


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("spec", MODELS, ids="-".join)
def test_types_are_those_of_a_direct_computation(spec, padding):
    if spec[1] != "llama" and padding == "left":
        pytest.skip("one family is enough for left padding")
    model, data = build(*spec), batches(padding=padding)
    held = {name: len(point.fwd_hooks) for name, point in model.hook_dict.items()}
    found = tt.frequency_dispersion(model, data, SITE)
    expected = directly(model, data, SITE)
    assert found.ids.tolist() == sorted(expected)
    statistics = found.sites[SITE].every
    for row, token in enumerate(found.ids.tolist()):
        x = expected[token]
        spread = (x - x.mean(0)).square().sum() / (len(x) - 1)
        assert int(statistics.counts[row]) == len(x)
        assert float(statistics.dispersion[row]) == pytest.approx(float(spread), rel=1e-5)
        assert float(statistics.centre_norm[row]) == pytest.approx(float(x.mean(0).norm()))
    flat = torch.cat(
        [(b["input"][b["attention_mask"].bool()] if padding else b).flatten() for b in data]
    )
    assert found.frequencies.tolist() == torch.bincount(flat, minlength=64).tolist()
    assert held == {name: len(point.fwd_hooks) for name, point in model.hook_dict.items()}


@pytest.mark.parametrize("side", ["right", "left"])
def test_pad_tokens_are_left_out_without_a_mask_too(side, tmp_path):
    """As they are everywhere else: the tokenizer's pad token tells them."""
    tokenizer = families.tiny_tokenizer(tmp_path, side)
    model = families.bridge("llama", tokenizer=tokenizer)
    told = batches(padding=side)
    for batch in told:
        batch["input"] = batch["input"].masked_fill(batch["input"] == tokenizer.pad_token_id, 9)
        batch["input"][batch["attention_mask"] == 0] = tokenizer.pad_token_id
    plain = [batch["input"] for batch in told]
    found, expected = (
        tt.frequency_dispersion(model, data, SITE, equal_n=3) for data in (plain, told)
    )
    assert tokenizer.pad_token_id not in found.ids
    assert torch.equal(found.frequencies, expected.frequencies)
    for name in ("every", "equal"):
        mine, theirs = (getattr(one.sites[SITE], name) for one in (found, expected))
        assert torch.equal(mine.counts, theirs.counts)


class Planted:
    """Batches of Zipf-like tokens, whose activations a hook replaces by seeded noise."""

    def __init__(self, power: float = 0.0, n: int = 12) -> None:
        self.model = build(*MODELS[1])
        p = 1 / torch.arange(1, 61).double()
        generator = torch.Generator().manual_seed(0)
        draws = torch.multinomial(p, n * 8 * 30, replacement=True, generator=generator)
        self.batches = list((draws + 4).view(n, 8, 30))
        size = (p / p.sum()) ** (power / 2)
        scale = torch.ones(64)
        scale[4:] = size.float()
        self.generator = torch.Generator().manual_seed(1)

        def noise(x, hook):
            drawn = torch.randn(x.shape, generator=self.generator)
            return drawn * scale[self.tokens][..., None]

        self.noise = noise

    def __iter__(self):
        for tokens in self.batches:
            self.tokens = tokens
            yield tokens


def moments_of(planted: Planted):
    """Measure through the collector, whose batches the planted hook follows."""
    rows = TokenRows(
        torch.arange(4, 64),
        64,
        PositionMask("all"),
        shuffled=False,
        equal=None,
        seed=0,
    )
    site = "blocks.1.hook_resid_pre"
    with planted.model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", planted.noise)]):
        return collect_types(planted.model, iter(planted), site, rows, 60, torch.float64)[site]


def test_the_result_shows_itself():
    found = tt.frequency_dispersion(
        build(*MODELS[1]), batches(6), ["blocks.0.hook_resid_post", SITE], equal_n=3
    )
    frame = found.to_dataframe()
    assert frame["site"].tolist() == ["blocks.0.hook_resid_post", SITE, "embed.W_E", "unembed.W_U"]
    assert frame["static_norm"].notna().sum() == 2
    assert "shuffled types by" in repr(found)
    assert "<table" in found._repr_html_()
    json.dumps(found.conventions)
    assert len(found.plot().axes) == 1
    assert found.plot_site(SITE).axes[0].get_xscale() == "log"
    types = found.types(SITE)
    assert types["frequency"].is_monotonic_decreasing
    assert {"id", "count", "frequency", "dispersion", "norm"} <= set(types)
    variance = found.variance(SITE)
    row = frame.set_index("site").loc[SITE]
    assert row["pearson"] == variance.pearson.r
    known = types[types["frequency"] > 0]
    slope = np.polyfit(np.log(known["frequency"]), np.log(known["dispersion"] ** 2), 1)[0]
    assert row["exponent"] == pytest.approx(slope)
    assert "squared distance ~ frequency^p" in found.conventions["meaning"]["exponent"]
    logs = torch.tensor(known[["frequency", "dispersion"]].to_numpy()).log()
    assert row["pearson"] == pytest.approx(float(torch.corrcoef(logs.T)[0, 1]))


def test_a_site_where_types_have_no_spread_leaves_the_others_their_rows():
    model = build(*MODELS[1])
    found = tt.frequency_dispersion(model, batches(6), ["hook_embed", SITE], equal_n=3)
    frame = found.to_dataframe().set_index("site")
    assert frame["n_types"].iloc[0] == 0 and math.isnan(frame["pearson"].iloc[0])
    alone = tt.frequency_dispersion(model, batches(6), SITE, equal_n=3).to_dataframe().iloc[0]
    assert frame.loc[SITE, "pearson"] == alone["pearson"]
    assert "over 1 sites" in found.headline() and len(found.plot().axes) == 1
    flat = tt.frequency_dispersion(model, batches(6), "hook_embed", static=False)
    assert "there is no spread" in repr(flat) and "<table" in flat._repr_html_()
    assert len(flat.plot().axes) == 1
    with pytest.raises(tt.TangentValueError, match="0 types count and [0-9]+ have no spread"):
        flat.variance(next(iter(flat.sites)))


def test_a_wrong_divisor_fakes_a_correlation_where_all_types_are_alike():
    """Shuffled types: a spread over n grows with n; over n - 1 it does not."""
    model = build(*MODELS[1])
    p = 1 / torch.arange(1, 61).double()
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(p, 40 * 12 * 20, replacement=True, generator=generator) + 4
    row = (
        tt.frequency_dispersion(model, list(draws.view(20, 24, 20)), SITE, static=False)
        .to_dataframe()
        .iloc[0]
    )
    assert abs(row["shuffled"]) < 0.3
    assert row["shuffled_naive_trap"] > row["shuffled"]


def test_equally_many_are_exactly_as_many():
    found = tt.frequency_dispersion(build(*MODELS[1]), batches(8), SITE, equal_n=4)
    one = found.sites[SITE]
    assert set(one.equal.counts[one.complete].tolist()) == {4}
    assert one.complete.tolist() == (one.every.counts >= 4).tolist()
    again = tt.frequency_dispersion(build(*MODELS[1]), batches(8), SITE, equal_n=4)
    assert torch.equal(again.sites[SITE].equal.spreads, one.equal.spreads)
    other = tt.frequency_dispersion(build(*MODELS[1]), batches(8), SITE, equal_n=4, seed=1)
    assert not torch.equal(other.sites[SITE].equal.spreads, one.equal.spreads)


def test_memory_does_not_grow_with_tokens():
    few, many = (tt.frequency_dispersion(build(*MODELS[1]), batches(1) * n, SITE) for n in (1, 5))
    assert len(few.ids) <= len(many.ids) <= 60
    kept = [sum(t.numel() for t in vars(one.sites[SITE].every).values()) for one in (few, many)]
    assert kept[1] == 3 * len(many.ids)
    assert kept[0] == 3 * len(few.ids)


def test_batches_that_can_be_read_once():
    model, data = build(*MODELS[1]), batches()
    counts = token_counts(data, 64)
    once = tt.frequency_dispersion(model, iter(data), SITE, frequencies=counts)
    whole = tt.frequency_dispersion(model, data, SITE)
    assert len(once.ids) == 64
    assert once.variance(SITE).pearson.r == pytest.approx(whole.variance(SITE).pearson.r)
    with pytest.raises(tt.TangentValueError, match="read only once"):
        tt.frequency_dispersion(model, iter(data), SITE)
    with pytest.raises(tt.TangentValueError, match="read only once"):
        tt.frequency_dispersion(model, iter(data), SITE, frequencies=counts, equal_n=2)


def test_given_frequencies_leave_out_what_they_do_not_tell():
    model = build(*MODELS[1])
    whole = tt.frequency_dispersion(model, batches(), SITE)
    some = {int(token): float(token) for token in whole.ids[:10]}
    found = tt.frequency_dispersion(model, batches(), SITE, frequencies=some)
    assert found.variance(SITE).n_types == 10
    assert found.conventions["frequencies"] == "given"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({-1: 5.0, 9: 1.0}, "a token id is -1"),
        ({64: 5.0, 9: 1.0}, "from 0 to 63"),
        ({9: -2.0}, "1 frequencies are negative"),
        (torch.linspace(-4, 1, 64), "not as logarithms"),
        (torch.full((64,), torch.inf), "64 frequencies are negative or infinite"),
        ([1.0] * 64, "got list"),
    ],
)
def test_frequencies_that_are_none_are_refused(given, told):
    with pytest.raises(tt.TangentValueError, match=told):
        tt.frequency_dispersion(build(*MODELS[1]), batches(), SITE, frequencies=given)


def test_numbers_out_of_range_are_refused_and_large_seeds_are_not():
    model = build(*MODELS[1])
    for name, value in {"equal_n": 1, "min_count": 2.5, "seed": -1}.items():
        with pytest.raises(tt.TangentValueError, match=f"{name} is {value}"):
            tt.frequency_dispersion(model, batches(), SITE, **{name: value})
    tt.frequency_dispersion(model, batches(), SITE, seed=2**63 - 1)


TOKENS = families.tiny_tokens(batch=4, pos=12)
BAD_BATCHES = {
    "64 to 64": TOKENS.clone().fill_(64),
    "got -1 to": TOKENS.clone().index_fill(1, torch.tensor([0]), -1),
    "no tokens: leave it out": TOKENS[:0],
    r"\[4, 11\] does not fit tokens \[4, 12\]": {
        "input": TOKENS,
        "attention_mask": torch.ones(4, 11),
    },
}


@pytest.mark.parametrize("told", BAD_BATCHES)
def test_batches_that_the_model_cannot_read_are_refused(told):
    """Also where they are read once, and no pass before the model's sees them."""
    model, data = build(*MODELS[1]), [TOKENS, BAD_BATCHES[told]]
    for options in ({}, {"frequencies": torch.arange(64.0)}):
        with pytest.raises(tt.TangentValueError, match=told):
            tt.frequency_dispersion(model, iter(data) if options else data, SITE, **options)


def test_what_it_refuses():
    model = build(*MODELS[1])
    with pytest.raises(tt.TangentValueError, match="min_count is 1"):
        tt.frequency_dispersion(model, batches(), SITE, min_count=1)
    with pytest.raises(tt.TangentValueError, match="Tokenize first"):
        tt.frequency_dispersion(model, ["a text"], SITE)
    with pytest.raises(tt.TangentValueError, match="0 types occur 500 times"):
        tt.frequency_dispersion(model, batches(), SITE, min_count=500)
    with pytest.raises(tt.TangentValueError, match=r"64 token ids, .* got \[3\]"):
        tt.frequency_dispersion(model, batches(), SITE, frequencies=torch.ones(3))
    with pytest.raises(tt.TangentValueError, match="one vector"):
        tt.frequency_dispersion(model, batches(), "blocks.0.attn.hook_q")
    with pytest.raises(tt.TangentKeyError, match="was not measured"):
        tt.frequency_dispersion(model, batches(), SITE).types("blocks.0.hook_mlp_out")
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


# Where frequencies come from --------------------------------------------------------------------


def test_counts_leave_padding_out():
    tokens = torch.tensor([[5, 5, 7], [5, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    counts = token_counts({"input": tokens, "attention_mask": mask}, 8)
    assert counts.tolist() == [0, 0, 0, 0, 0, 3, 0, 1]
    with pytest.raises(tt.TangentValueError, match=r"in \[0, 6\), got 0 to 7"):
        token_counts(tokens, 6)


def test_words_tell_of_the_tokens_that_they_are(tmp_path):
    tokenizer = families.tiny_tokenizer(tmp_path)
    words = {"w5": 0.25, "w7": 0.5, "not a word at all": 9.0}
    found = word_frequencies(words, tokenizer)
    (five,), (seven,) = (tokenizer.encode(w, add_special_tokens=False) for w in ("w5", "w7"))
    assert float(found[five]) == 0.25
    assert float(found[seven]) == 0.5
    assert int(found.isnan().sum()) == len(tokenizer) - 2
    (tmp_path / "a.json").write_text(json.dumps({"w5": 0.25, "w7": 0.5}))
    (tmp_path / "a.tsv").write_text("word\tcount\nw5\t0.25\nw7\t0.5\n")
    (tmp_path / "a.csv").write_text(f"{five},0.25\n{seven},0.5\n")
    for name in ("a.json", "a.tsv", "a.csv"):
        read = read_counts(tmp_path / name, tokenizer)
        assert torch.equal(read.nan_to_num(-1), found.nan_to_num(-1))


def test_files_that_hold_no_counts_are_told(tmp_path):
    tokenizer = families.tiny_tokenizer(tmp_path)
    (tmp_path / "bad.json").write_text("[1, 2]")
    for name in ("bad.json", "missing.tsv"):
        with pytest.raises(tt.TangentFileError, match="holds no counts"):
            read_counts(tmp_path / name, tokenizer)
    with pytest.raises(tt.TangentValueError, match="none of 1 words"):
        word_frequencies({"??": 1.0}, tokenizer)
    with pytest.raises(tt.TangentValueError, match="is -1"):
        word_frequencies({"w5": -1}, tokenizer)


@pytest.mark.parametrize("power", [-0.6, 0.0, 0.6])
def test_a_planted_power_is_found(power):
    """Activations replaced by noise whose variance goes as a power of the frequency."""
    found = moments_of(Planted(power)).every.statistics()
    p = 1 / torch.arange(1, 61).double()
    chosen = found.counts >= 2
    x, y = p[chosen].log(), found.dispersion[chosen].log()
    x, y = x - x.mean(), y - y.mean()
    assert float(x @ y / x.square().sum()) == pytest.approx(power, abs=0.1)
    assert math.isfinite(float(found.dispersion[chosen].max()))
