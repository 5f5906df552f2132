"""Models are shared between tests, so each test is checked to leave none of them changed."""

from __future__ import annotations

import pytest

from tests.hooks import helpers
from tl_tangent.hooks.attachment import attachments_of


@pytest.fixture(autouse=True)
def shared_models_stay_clean(monkeypatch):
    used = []
    build = helpers.build

    def remember(*args, **kwargs):
        used.append(build(*args, **kwargs))
        return used[-1]

    monkeypatch.setattr(helpers, "build", remember)
    yield
    for model in used:
        model.zero_grad()
        model.requires_grad_(True)
        model.reset_hooks(including_permanent=True)
        if attachments_of(model) is not None:
            model.detach() if hasattr(model, "detach") else None
            from tl_tangent import detach

            detach(model)
