"""The printed table of a layer ablation: fixed width, one row a site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# column of the frame, two lines of heading, format
COLUMNS = (
    ("variance_share", "var.", "in Q_T", ".3f"),
    ("participation_ratio", "PR", "", ".1f"),
    ("participation_ratio_without_tangent", "PR", "w/o Q_T", ".1f"),
    ("isoscore", "IsoScore", "", ".4f"),
    ("isoscore_without_tangent", "IsoScore", "w/o Q_T", ".4f"),
    ("loss_tangent_ablated", "loss", "w/o Q_T", ".3f"),
    ("increase_tangent_ablated", "more", "w/o Q_T", "+.3f"),
    ("increase_control_ablated_mean", "control", "mean", "+.3f"),
    ("loss_control_ablated_sd", "control", "sd", ".3f"),
    ("increase_control_ablated_min", "control", "min", "+.3f"),
    ("increase_control_ablated_max", "control", "max", "+.3f"),
    ("loss_tangent_kept", "loss", "only Q_T", ".3f"),
    ("first_direction_share_with_position_0", "1st dir.", "with pos 0", ".4f"),
)


def format_table(frame: pd.DataFrame) -> str:
    """Return the frame of a :class:`~tl_tangent.analysis.LayerAblation` as text of fixed width.

    Sites are told by their layer where that suffices.
    """
    label = "layer" if frame["layer"].is_unique and frame["layer"].notna().all() else "site"
    columns = [[label, "", *(str(value) for value in frame[label])]]
    for name, first, second, spec in COLUMNS:
        columns.append([first, second, *(format(value, spec) for value in frame[name])])
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(_cells(row, widths)) for row in zip(*columns, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*lines[:2], rule, *lines[2:]])


def _cells(row: Sequence[Any], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
