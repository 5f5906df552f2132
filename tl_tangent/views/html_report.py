"""One page of HTML that holds results as a person mails them: words, pictures, tables, heads."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.views.head_gallery import HeadGallery
from tl_tangent.views.report_shell import SCRIPT, STYLE
from tl_tangent.views.widgets import POLICY, Widget, library, view_html
from tl_tangent.views.widgets import STYLE as WIDGET_STYLE

if TYPE_CHECKING:
    import pandas as pd

ROWS_SHOWN = 40  # of a table; all of them are in its file


def html_report(
    results: Mapping[str, Any],
    path: str | Path,
    *,
    title: str = "tl_tangent",
    about: str = "",
) -> Path:
    """Write one self-contained page about some results; return its path.

    A result is said in its own words (its headline, which has the control in it), drawn, tabled
    with the whole table as a download, and its conventions are listed. The page needs no network
    and may not use one, by its Content-Security-Policy.

    Args:
        results: by the headings of their sections: any result of this package (what has
            ``to_dataframe``), a :class:`~tl_tangent.views.widgets.Widget` or a
            :class:`~tl_tangent.views.head_gallery.HeadGallery`.
        path: of the page.
        title: its heading.
        about: what was run, in plain text.

    Raises:
        TangentValueError: no results, results without headings, or something that can't be shown.
        TangentFileError: the page can't be written.
    """
    if not isinstance(results, Mapping):
        raise TangentValueError(
            f"results is a {type(results).__name__}; accepted is a mapping from headings to "
            'results, such as {"Gradients": found}'
        )
    if not results:
        raise TangentValueError("there are no results to report: give one or more, by heading")
    sections = [_section(f"part-{i}", name, one) for i, (name, one) in enumerate(results.items())]
    links = "\n".join(
        f'<li><a href="#part-{i}">{escape(name)}</a></li>' for i, name in enumerate(results)
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in package_versions().items() if version
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = "\n".join(sections)
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}{WIDGET_STYLE}</style>
{library()}
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{f"<p>{escape(about)}</p>" if about else ""}
<p class="soft">Made {made} with {escape(versions)}.</p>
</header>
<nav aria-label="Contents"><ol>
{links}
</ol></nav>
<main>
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""
    return _written(Path(path), html)


def _written(path: Path, html: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise TangentFileError(
            f"{path} can't be written ({error.strerror or error}); name another file"
        ) from error
    return path


def _section(name: str, heading: str, result: Any) -> str:
    return (
        f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{_content(name, result)}\n</section>'
    )


def _content(name: str, result: Any) -> str:
    if isinstance(result, Widget):
        return view_html(result, f"{name}-view")
    if isinstance(result, HeadGallery):
        return (
            f"<p><strong>{escape(result.heading)}</strong></p>\n{result.to_html(f'{name}-heads')}"
        )
    if not hasattr(result, "to_dataframe"):
        raise TangentValueError(
            f"a {type(result).__name__} can't be shown in a report. Accepted: results of this "
            "package with to_dataframe(), a Widget, or a HeadGallery"
        )
    words = result.headline() if hasattr(result, "headline") else repr(result)
    parts = [f'<p class="finding">{escape(words)}</p>']
    if hasattr(result, "plot"):
        parts.append(_figure(result, words))
    parts.append(_table(result.to_dataframe(), name))
    if getattr(result, "conventions", None):
        parts.append(_conventions(result.conventions))
    return "\n".join(parts)


def _figure(result: Any, words: str) -> str:
    stream = io.BytesIO()
    result.plot().savefig(stream, format="png", dpi=120)
    picture = base64.b64encode(stream.getvalue()).decode()
    alt = f"Figure: {words.splitlines()[0]}"
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{picture}"></figure>'


def _table(frame: pd.DataFrame, name: str) -> str:
    """The first rows, and all of them as a file."""
    shown = frame.head(ROWS_SHOWN)
    rows = shown.to_html(
        index=False, border=0, na_rep="", float_format=lambda x: f"{x:.4g}", escape=True
    )
    cut = f" (the first {len(shown)} of {len(frame)} rows)" if len(shown) < len(frame) else ""
    data = base64.b64encode(frame.to_csv(index=False).encode()).decode()
    return (
        f"<details><summary>Table{cut}</summary>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
        f"{rows}</div></details>\n"
        f'<p><a class="download" download="{name}.csv" href="data:text/csv;base64,{data}">'
        f"Download {len(frame)} rows as CSV</a></p>"
    )


def _conventions(conventions: Mapping[str, Any]) -> str:
    told = json.dumps(dict(conventions), indent=1, default=str, ensure_ascii=False)
    return f"<details><summary>Conventions</summary><pre>{escape(told)}</pre></details>"
