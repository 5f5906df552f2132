"""Plain HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def html_table(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    """Return ``rows`` as an HTML table, without the columns that are None in every row."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else escape(str(value))
