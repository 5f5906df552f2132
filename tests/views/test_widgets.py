"""Widgets: pages that need nothing else, strings that stay strings, numbers that stay numbers."""

from __future__ import annotations

import json
import re
import socket
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tl_tangent.views import widgets
from tl_tangent.views.widgets import AS_HTML, AS_TEXT, MAX_CELLS, Widget, page

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</SCRIPT >",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "<img/src=x/onerror=alert(1)>",
    "&lt;b&gt;",
    "\u2028",
    "\u2029",
    '"',
    "'",
    "\\",
    "\\u003c",
    "\n",
    "日本",
    "\ud800",
]
CALL = re.compile(r'window\.CircuitsVis\.render\("([\w-]+)", CircuitsVis\.(\w+), (.*)\);</script>')


def a_widget(element: str = "AttentionHeads", tokens=("a", "b"), heading: str = "two maps", **more):
    n = len(tokens)
    props = {"attention": torch.eye(n)[None], "values": torch.ones(n), "tokens": list(tokens)}
    return Widget(element, props, heading, **more)


def calls(html: str) -> list[tuple[str, str, dict]]:
    """What the page asks the script to draw: box, element, props."""
    return [(box, element, json.loads(props)) for box, element, props in CALL.findall(html)]


class Tags(HTMLParser):
    """The tags and the text of a page, as a browser reads them: scripts end at their end tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.in_script = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.in_script = tag == "script"
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        self.text += "" if self.in_script else data


# Strings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", [*AS_TEXT, *AS_HTML])
def test_hostile_tokens_do_not_leave_the_script(element):
    plain = Tags(page([a_widget(element)], "t"))
    hostile = Tags(page([a_widget(element, HOSTILE)], "t"))
    assert hostile.tags == plain.tags
    assert "alert" not in hostile.text


def test_tokens_arrive_as_they_are_where_the_element_shows_text():
    ((_, _, props),) = calls(page([a_widget("AttentionHeads", HOSTILE)], "t"))
    assert props["tokens"] == HOSTILE


def test_tokens_arrive_escaped_where_the_element_shows_html():
    ((_, _, props),) = calls(page([a_widget("ColoredTokens", HOSTILE)], "t"))
    assert [Tags(token).tags for token in props["tokens"]] == [[]] * len(HOSTILE)
    assert props["tokens"][3] == "&lt;img src=x onerror=alert(1)&gt;"
    assert props["tokens"][5] == "&amp;lt;b&amp;gt;"


def test_no_character_that_html_or_javascript_reads_is_left_in_the_props():
    html = page([a_widget(tokens=HOSTILE)], "t")
    (_, _, props), *_ = CALL.findall(html)
    assert props.isascii()
    assert not set("<>&") & set(props)
    for code in ("003c", "003e", "0026", "2028", "2029"):
        assert rf"\u{code}" in props


@pytest.mark.parametrize("field", ["heading", "caption", "note"])
def test_words_beside_the_view_are_text(field):
    words = {"heading": "h", field: "<script>alert(1)</script> & so on"}
    widget = Widget("AttentionHeads", {}, **words)
    for html in (page([widget], widget.heading), widget._repr_html_()):
        assert "<script>alert(1)</script> & so on" in Tags(html).text
        assert Tags(html).tags.count("script") == 2  # the library's and the view's


# Pages ------------------------------------------------------------------------------------------


def test_a_page_of_several_widgets_has_the_script_once():
    several = [a_widget(heading=f"view {i}") for i in range(3)]
    html = page(several, "three")
    assert html.count(widgets.library()) == 1
    assert html.count("var CircuitsVis=") == 1
    assert Tags(html).tags.count("script") == 1 + len(several)
    boxes = [box for box, _, _ in calls(html)]
    assert len(set(boxes)) == 3
    assert Tags(html).ids == boxes  # each draws into a box that is there


def test_a_page_loads_nothing():
    html = page([a_widget(), a_widget("ColoredTokens")], "t")
    own = html.replace(widgets.library(), "")
    for asking in ("http:", "https:", "//", " src=", "href", "import", "@import", "url("):
        assert asking not in own
    assert "default-src 'none'" in own
    assert "sourceMappingURL" not in html


def test_nothing_is_asked_of_the_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert "CircuitsVis.AttentionHeads" in a_widget()._repr_html_()


def test_every_output_of_a_notebook_stands_alone():
    widget = a_widget()
    first, again = widget._repr_html_(), widget._repr_html_()
    for html in (first, again):
        assert html.count(widgets.library()) == 1
        ((box, _, _),) = calls(html)
        assert Tags(html).ids == [box]
    assert calls(first)[0][0] != calls(again)[0][0]  # a rerun finds its own box
    assert calls(first)[0][2] == calls(again)[0][2]


def test_the_script_runs_only_where_the_page_has_none_and_can_not_end_early():
    library = widgets.library()
    assert library.startswith("<script>window.CircuitsVis = window.CircuitsVis || (function")
    assert library.lower().count("</script") == 1
    assert "<!--" not in library
    assert all(f"{element}:()=>" in library for element in (*AS_TEXT, *AS_HTML))


def test_a_saved_page_is_whole(tmp_path):
    widget = a_widget(heading="größe < 1")
    path = widget.save(tmp_path / "heads.html")
    html = path.read_bytes().decode("utf-8")
    assert html == page([widget], "größe < 1")
    assert html.startswith("<!DOCTYPE html>")
    assert '<meta charset="utf-8">' in html
    assert "<title>größe &lt; 1</title>" in html
    assert html.count("größe &lt; 1") == 2  # title and heading, not a third time above it
    assert html.rstrip().endswith("</html>")


# Values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_tensors_of_every_dtype(dtype):
    values = (
        torch.tensor([[0.0, -1.5, 3.0], [448.0, 0.015625, -0.0]])
        .to(dtype)
        .requires_grad_(dtype.itemsize > 1)
    )
    assert a_widget_of(values) == [[0, -1.5, 3], [448, 0.01562, 0]]


@pytest.mark.parametrize(
    "value, expected",
    [
        (np.array([[1, 2]], dtype=np.int8), [[1, 2]]),
        (np.array([0.5], dtype=np.float16), [0.5]),
        (np.float32(0.25), 0.25),
        (torch.tensor([True, False]), [True, False]),
        (torch.tensor(3), 3),
        ([torch.tensor([1.0]), (2.0, "x"), None], [[1], [2, "x"], None]),
        ({"a": torch.ones(1)}, {"a": [1]}),
    ],
)
def test_arrays_lists_and_scalars(value, expected):
    assert a_widget_of(value) == expected


def a_widget_of(value):
    """What the script gets for a prop of this value."""
    ((_, _, props),) = calls(page([Widget("AttentionHeads", {"prop": value}, "h")], "h"))
    return props["prop"]


def test_numbers_keep_four_digits_and_pages_stay_small():
    exact = torch.randn(500, dtype=torch.float64) * 10 ** torch.linspace(-9, 9, 500).double()
    shown = torch.tensor(a_widget_of(exact), dtype=torch.float64)
    assert ((shown - exact).abs() <= 0.5e-3 * exact.abs() * (1 + 1e-9)).all()
    assert (shown != exact).any()
    assert len(json.dumps(a_widget_of(torch.zeros(100)))) == len(json.dumps([0] * 100))


def test_what_is_none_is_left_out():
    ((_, _, props),) = calls(page([Widget("AttentionHeads", {"a": None, "b": 1}, "h")], "h"))
    assert props == {"b": 1}


def test_what_was_shown_does_not_follow_the_tensor():
    values = torch.zeros(2)
    widget = Widget("AttentionHeads", {"values": values}, "h")
    values += 1
    assert widget.props["values"] == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("made", [torch.tensor, np.array, list])
def test_numbers_without_a_colour_are_refused(bad, made):
    with pytest.raises(tt.TangentValueError, match=f"attention has a value {bad}"):
        Widget("AttentionHeads", {"attention": made([1.0, bad])}, "h")


@pytest.mark.parametrize("made", [torch.zeros, np.zeros, lambda n: [0] * n, lambda n: ([0] * n,)])
def test_too_many_values_are_refused_and_as_many_as_fit_are_not(made):
    assert Widget("AttentionHeads", {"attention": made(MAX_CELLS)}, "h").props
    with pytest.raises(tt.TangentValueError, match=f"attention has {MAX_CELLS + 1} values.*fewer"):
        Widget("AttentionHeads", {"attention": made(MAX_CELLS + 1)}, "h")


def test_other_things_are_refused():
    with pytest.raises(tt.TangentKeyError, match="'AttentionHead'.*AttentionHeads"):
        Widget("AttentionHead", {}, "h")
    with pytest.raises(tt.TangentValueError, match="tokens has a set"):
        Widget("AttentionHeads", {"tokens": {"a"}}, "h")
    with pytest.raises(tt.TangentValueError, match="values has a complex"):
        Widget("AttentionHeads", {"values": torch.zeros(1, dtype=torch.complex64)}, "h")


def test_repr_is_one_line():
    assert repr(a_widget(heading="two maps")) == "Widget(AttentionHeads: two maps)"
