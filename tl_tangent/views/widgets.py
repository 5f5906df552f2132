"""The React widgets of circuitsvis in a notebook or in a page of their own, without a network."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from torch import Tensor

from tl_tangent.errors import TangentImportError, TangentKeyError, TangentValueError, nearest

# The browser makes an object of every cell before it shows anything, and again of a map's cells at
# every hover. Twice as many kept Chromium busy for some 20 seconds on two slow cores.
MAX_CELLS = 100_000
DIGITS = 4  # significant ones: more than a colour or a tooltip can tell

# They show strings as text, on a canvas or through React.
AS_TEXT = ("AttentionHeads", "AttentionPattern")
# They hand strings to the browser as HTML.
AS_HTML = (
    "ColoredTokens",
    "ColoredTokensMulti",
    "TextNeuronActivations",
    "TokenLogProbs",
    "TopkSamples",
    "TopkTokens",
)


@dataclass(frozen=True, eq=False, repr=False)
class Widget:
    """One view: an element of circuitsvis and what it shows, with a heading in plain text.

    In a notebook every view carries the script of circuitsvis (1.3 MB), and runs it only where the
    page does not have it yet. An output can't lean on another one that has it: that one may be
    cleared, come later in a saved notebook, or live in a frame of its own. Where that is too much,
    put several views into one page: :func:`page` and :meth:`save` carry the script once.

    Attributes:
        element: the name of the React element, one of :data:`AS_TEXT` or :data:`AS_HTML`.
        props: what the element takes. Tensors of any dtype and device, arrays and numbers become
            lists and numbers of 4 significant digits; None is left out.
        heading: one line, also the title of a page.
        caption: how to read it.
        note: what has been left out, and how to get it.

    Raises:
        TangentKeyError: an element that circuitsvis does not have.
        TangentValueError: NaN or infinity; more than :data:`MAX_CELLS` values, which would hang the
            browser; something that JSON can't hold.
    """

    element: str
    props: Mapping[str, Any]
    heading: str
    caption: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.element not in (*AS_TEXT, *AS_HTML):
            raise TangentKeyError(
                f"circuitsvis has no element {self.element!r} that is shown here. Nearest: "
                f"{nearest(self.element, (*AS_TEXT, *AS_HTML))}."
            )
        plain = {name: _plain_prop(name, x) for name, x in self.props.items() if x is not None}
        object.__setattr__(self, "props", plain)

    def save(self, path: str | Path) -> Path:
        """Write the view as one page of HTML that needs nothing else; return its path."""
        path = Path(path)
        path.write_text(page([self], self.heading), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"Widget({self.element}: {self.heading})"

    def _repr_html_(self) -> str:
        # an id of its own for every showing: a rerun must not draw into the output of the last one
        view = view_html(self, f"tl-{uuid4().hex[:12]}")
        return f"<style>{STYLE}</style>\n{library()}\n{view}"


def page(widgets: Iterable[Widget], title: str) -> str:
    """Return one self-contained page of HTML with all ``widgets``, the script in it once.

    The page forbids the browser to load anything, in its Content-Security-Policy.
    """
    widgets = list(widgets)
    views = "\n".join(view_html(widget, f"view-{i}") for i, widget in enumerate(widgets))
    named = [title] == [widget.heading for widget in widgets]  # one view's heading tells it already
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{_PAGE_STYLE}{STYLE}</style>
{library()}
</head>
<body>
{"" if named else f"<h1>{escape(title)}</h1>"}
{views}
</body>
</html>
"""


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_PAGE_STYLE = """
:root { color-scheme: light dark; font-family: sans-serif; }
body { margin: 1em auto; max-width: 75em; padding: 0 1em; }
h1 { font-size: 1.3em; }"""
# Widgets draw dark text on nothing, so that they need a light ground in a dark notebook too.
STYLE = """
.tl-widget-note { border-left: 4px solid #E69F00; padding-left: 0.6em; }
.tl-widget-view { background: #fff; color: #111; padding: 8px; overflow-x: auto; }
.tl-widget-view h4 { font-size: 10px; line-height: 1.2; }
"""


def view_html(widget: Widget, name: str) -> str:
    """Return the HTML of one widget, drawn into a box of this name by a script after it."""
    lines = [f"<p><strong>{escape(widget.heading)}</strong></p>"]
    if widget.caption:
        lines.append(f"<p>{escape(widget.caption)}</p>")
    if widget.note:
        lines.append(f'<p class="tl-widget-note">{escape(widget.note)}</p>')
    lines.append(
        f'<div class="tl-widget-view" id="{name}">A script draws this view. If it does not: '
        "trust the notebook, or run the cell again.</div>"
    )
    arguments = f'"{name}", CircuitsVis.{widget.element}, {_props_json(widget)}'
    lines.append(f"<script>window.CircuitsVis.render({arguments});</script>")
    return '<section class="tl-widget">\n' + "\n".join(lines) + "\n</section>"


def _props_json(widget: Widget) -> str:
    """Return the props as JSON, their strings inert in an element that takes them as HTML."""
    return script_json(_escaped(widget.props) if widget.element in AS_HTML else widget.props)


def script_json(props: Any) -> str:
    """Return JSON that can't end the script it stands in."""
    # json leaves no character beyond ASCII, U+2028 and U+2029 among them
    text = json.dumps(props, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _escaped(value: Any) -> Any:
    """Escape every string for an element that takes strings as HTML."""
    if isinstance(value, str):
        return escape(value, quote=False)
    if isinstance(value, Mapping):
        return {key: _escaped(x) for key, x in value.items()}
    return [_escaped(x) for x in value] if isinstance(value, list) else value


@functools.cache
def library() -> str:
    """Return the script of circuitsvis, which defines a global that is not there yet."""
    found = files("circuitsvis").joinpath("dist", "cdn", "iife.js")
    if not found.is_file():
        raise TangentImportError(
            f"circuitsvis is installed without its script {found}, so that nothing can be shown. "
            "Install it again: pip install --force-reinstall --no-deps 'circuitsvis>=1.43,<2'."
        )
    source = re.sub(r"//# sourceMappingURL=\S*", "", found.read_text(encoding="utf-8"))
    # what would end the script, or change how the browser reads it, stands in strings only
    source = re.sub(r"</(?=script)", r"<\\/", source, flags=re.IGNORECASE)
    source = source.replace("<!--", r"<\x21--")
    return (
        "<script>window.CircuitsVis = window.CircuitsVis || (function () {\n"
        f"{source.strip()}\nreturn CircuitsVis;\n}})();</script>"
    )


def _plain_prop(name: str, value: Any) -> Any:
    size = _size(value)
    if size > MAX_CELLS:
        raise TangentValueError(
            f"{name} has {size} values, and a view of more than {MAX_CELLS} hangs the browser. "
            "Show fewer heads or positions."
        )
    return _plain(name, value)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 1


def _plain(name: str, value: Any) -> Any:
    """Turn tensors, arrays and numbers into what JSON holds."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(name, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, x) for x in value]
    if isinstance(value, float):
        return _rounded(name, value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TangentValueError(
        f"{name} has a {type(value).__name__}, which a view can't show. Accepted: numbers, "
        "strings, None, and tensors, arrays, lists and mappings of them."
    )


def _rounded(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise TangentValueError(
            f"{name} has a value {value}, which has no colour. Fill it first, for example with "
            "masked_fill or nan_to_num."
        )
    rounded = float(f"{value:.{DIGITS}g}")
    # "0" and "3" for "0.0" and "3.0", as half the cells of a causal map are
    return int(rounded) if rounded.is_integer() and abs(rounded) < 10**DIGITS else rounded
