"""What tells sites apart on an axis."""

from __future__ import annotations

import pytest

from tl_tangent.views.site_axis import site_labels


@pytest.mark.parametrize(
    ("sites", "names", "what"),
    [
        (
            ["blocks.0.hook_resid_post", "blocks.10.hook_resid_post"],
            ["0", "10"],
            "layer (blocks.*.hook_resid_post)",
        ),
        (["blocks.0.hook_resid_post", "ln_final"], ["blocks.0.hook_resid_post", "ln_final"], ""),
        (["blocks.0.a", "blocks.0.b"], ["blocks.0.a", "blocks.0.b"], ""),
        ([], [], ""),
    ],
)
def test_layers_by_number_where_that_tells_sites_apart(sites, names, what):
    assert site_labels(sites) == (names, what)
