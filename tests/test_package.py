"""The package as a whole: a light import, offline, and requirements that agree with each other."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"matplotlib", "sklearn", "scipy", "pandas", "circuitsvis", "transformers", "plotly"}
PROBE = """
import json, sys, time
start = time.perf_counter()
import transformer_lens
from transformer_lens.model_bridge import TransformerBridge  # TransformerLens 4 imports it lazily
host, before = time.perf_counter() - start, set(sys.modules)
start = time.perf_counter()
import tl_tangent
print(json.dumps({
    "added": sorted(set(sys.modules) - before), "host": host, "ours": time.perf_counter() - start
}))
"""


@pytest.fixture(scope="module")
def imported():
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_import_brings_in_nothing_heavy_of_its_own(imported):
    assert "tl_tangent" in imported["added"]
    assert not HEAVY & {name.partition(".")[0] for name in imported["added"]}


def test_import_adds_under_half_of_the_import_of_transformer_lens(imported):
    assert imported["ours"] < 0.5 * imported["host"]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return {canonicalize_name(r.name): r for r in map(Requirement, filter(None, texts))}


def declared(*extras: str) -> list[Requirement]:
    optional = project()["optional-dependencies"]
    lists = [project()["dependencies"], *(optional[extra] for extra in extras)]
    return [Requirement(text) for texts in lists for text in texts]


def test_every_dependency_is_bounded_above():
    bounded = [r for r in declared("hooked", "demo", "sae", "studies") if "<" in str(r.specifier)]
    assert bounded == declared("hooked", "demo", "sae", "studies")


def test_the_pinned_set_is_exact_and_holds_all_that_is_declared():
    pins = requirements("pinned.txt")
    assert all(str(pin.specifier).startswith("==") for pin in pins.values())
    for need in declared("hooked", "demo", "sae", "dev"):
        version = str(pins[canonicalize_name(need.name)].specifier).removeprefix("==")
        assert need.specifier.contains(version), f"{need} is not met by {version}"


def test_the_newest_set_holds_all_that_is_declared():
    missing = {canonicalize_name(need.name) for need in declared("demo")} - set(
        requirements("newest.txt")
    )
    assert not missing
