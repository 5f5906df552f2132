"""Figures are pictures in a notebook, whether or not pyplot is there."""

from __future__ import annotations

import re
from pathlib import Path

from IPython.core.formatters import DisplayFormatter

from tests.views.test_run_figure import frame, told
from tl_tangent import views
from tl_tangent.views.run_figure import draw_run


def test_a_figure_is_its_picture_in_a_notebook():
    data, _ = DisplayFormatter().format(draw_run(frame(), told()))
    assert data["image/png"].startswith(b"\x89PNG")


def test_every_view_draws_such_figures_and_none_uses_pyplot():
    for path in Path(views.__path__[0]).glob("*_figure.py"):
        source = path.read_text(encoding="utf-8")
        assert "pyplot" not in source
        assert not re.search(r"\bFigure\(", source.replace("NewFigure(", "")), path.name
