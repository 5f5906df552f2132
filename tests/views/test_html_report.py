"""The report as a page: whole, quiet, alone, painted; a head that is pressed; hostile tokens."""

from __future__ import annotations

import base64
import io
import re

import pandas as pd
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.views.browser import needs_browser, opened, painted
from tl_tangent.views.head_gallery import LEVELS, HeadGallery
from tl_tangent.views.html_report import html_report

HOSTILE = [
    "</script><script>window.hit = 1</script>",
    '<img src=x onerror="window.hit = 1">',
    "<!--",
    "日本",
]
N = 10


@pytest.fixture(scope="module")
def results():
    model = tt.TangentBridge.from_hf(families.hf_model("llama"), None)
    tokens = families.tiny_tokens(batch=3, pos=N)
    inputs = tt.fit_subspaces(model, [tokens], "blocks.*.attn.hook_in", rank=3)
    stream = tt.fit_subspaces(model, [tokens], "blocks.0.hook_resid_post", rank=3)
    splits = [tt.split_attention_scores(model, tokens[:1], layer, inputs) for layer in (0, 1)]
    trace = tt.trace_residual(model, tokens, stream["blocks.0.hook_resid_post"], n_controls=2)
    labels = [*HOSTILE, *(f"t{i}" for i in range(N - len(HOSTILE)))]
    return {
        "splits": splits,
        "labels": labels,
        "parts": {
            "Heads": HeadGallery.of(splits, labels),
            "The <ledger>": trace,
            "Tokens": trace.show_tokens(lambda token: labels[token % N], 1),
            "Shares": tt.attention_term_shares(model, tokens, inputs, n_controls=2),
        },
    }


@pytest.fixture(scope="module")
def path(results, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "report.html"
    return html_report(results["parts"], target, title="A <b>title</b>", about="what was run")


def test_every_result_has_its_words_its_table_and_its_conventions(path, results):
    html = path.read_text(encoding="utf-8")
    trace = results["parts"]["The <ledger>"]
    assert "A &lt;b&gt;title&lt;/b&gt;" in html and "The &lt;ledger&gt;" in html
    assert html.count("<summary>Conventions</summary>") == 2
    assert html.count('class="finding"') == 2
    files = re.findall(r'href="data:text/csv;base64,([^"]*)"', html)
    frame = pd.read_csv(io.StringIO(base64.b64decode(files[0]).decode()))
    assert len(frame) == len(trace.to_dataframe())
    assert list(frame.columns) == list(trace.to_dataframe().columns)


def test_the_maps_of_a_gallery_are_the_terms_of_the_heads(results):
    gallery, splits = results["parts"]["Heads"], results["splits"]
    assert [head.name for head in gallery.heads] == [f"L{i}H{j}" for i in (0, 1) for j in range(4)]
    for head in gallery.heads:
        split = splits[head.layer]
        shown = torch.from_numpy(head.maps).double() * head.scale / LEVELS
        terms = torch.stack([split.tangent, split.cross, split.normal])[:, 0, head.head].double()
        expected = terms.masked_fill(~split.seen[0], 0)
        torch.testing.assert_close(shown, expected, rtol=0, atol=0.51 * head.scale / LEVELS)
        assert head.causal and 0 < head.shade <= head.scale


def test_what_can_not_be_shown_is_refused(tmp_path, results):
    with pytest.raises(tt.TangentValueError, match="there are no results"):
        html_report({}, tmp_path / "a.html")
    with pytest.raises(tt.TangentValueError, match="results is a list; accepted is a mapping"):
        html_report([1], tmp_path / "a.html")
    with pytest.raises(tt.TangentValueError, match="a dict can't be shown"):
        html_report({"x": {}}, tmp_path / "a.html")
    with pytest.raises(tt.TangentValueError, match="rows of no positions"):
        HeadGallery.of([])
    with pytest.raises(tt.TangentValueError, match="batch=1"):
        HeadGallery.of(results["splits"], None, batch=1)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_the_page_is_quiet_alone_painted_and_as_wide_as_its_window(path, width, dark):
    with opened(path, width=width, dark=dark) as found:
        found.page.wait_for_load_state("load")
        assert found.said == []
        assert [url for url in found.asked if not url.startswith("data:")] == [path.as_uri()]
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
        assert min(painted(found.page, "figure img")) > 20
        assert min(painted(found.page, ".tl-gallery img")) > 3
        ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark


@needs_browser
def test_a_head_that_is_pressed_is_drawn_large_with_its_numbers(path):
    with opened(path) as found:
        assert found.page.locator(".tl-large canvas").count() == 0
        for name in ("L0H1", "L1H2"):
            button = found.page.locator("button[data-head]", has_text=name)
            button.focus()
            found.page.keyboard.press("Enter")
            found.page.wait_for_selector(".tl-large canvas")
            assert button.get_attribute("aria-pressed") == "true"
            assert f"{name} tangent Zoomed" in found.page.locator(".tl-large").inner_text()
        assert found.page.locator("button[aria-pressed=true]").count() == 1
        found.page.wait_for_timeout(500)
        assert max(painted(found.page, ".tl-large canvas")) > 10
        assert found.said == []


@needs_browser
def test_hostile_tokens_are_text(path):
    with opened(path) as found:
        found.page.locator("button[data-head]").first.click()
        found.page.wait_for_selector(".tl-large canvas")
        assert found.page.evaluate("window.hit === undefined")
        strip = found.page.locator("#part-2").inner_text().replace("\u00a0", " ")
        assert HOSTILE[0] in strip
        assert found.page.locator("#part-2 img, #part-0 .tl-large img[src=x]").count() == 0
