# The same few targets for a newcomer, a contributor and CI. Only Python and pip are assumed.
#   make demo          set up .venv once, then run the main job on the embedded model
#   make study         set up .venv once, then train a small model and test its gradients
#   make test          set up .venv once, then run the tests
#   make test-newest   the same tests against the newest TransformerLens 4.x, in .venv-newest
#   make notebooks     run the notebooks of demos/ and hold their executed form against the sources
#   make lint          ruff and mypy
#   make benchmark     the speed ratios of the hook points, the analyses and the gradients
#   make pins          resolve requirements/pinned.txt again
#   make clean         remove the environments, the caches and out/
# PIP_ARGS holds extra pip arguments (a CPU-only torch, a mirror); PYTEST_ARGS extra pytest ones.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
VENV ?= .venv
VENV_NEWEST ?= .venv-newest
WORKERS ?= 2
OUT ?= out

BIN := $(VENV)/bin
BIN_NEWEST := $(VENV_NEWEST)/bin
PINS := requirements/pinned.txt requirements/embedded.txt
NEWEST := requirements/newest.txt requirements/embedded.txt
# Two workers of one thread each (torch's threads would fight over the cores), a file to a worker
# (fixtures are built once a file).
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
PYTEST := -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

.PHONY: help setup setup-newest demo study test test-newest notebooks lint benchmark pins clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.package
setup-newest: $(VENV_NEWEST)/.package

demo: setup
	$(BIN)/tl-tangent report --out $(OUT)/report

study: setup
	$(BIN)/tl-tangent study --out $(OUT)/study

test: setup
	$(TEST_ENV) $(BIN)/python $(PYTEST)

test-newest: setup-newest
	$(TEST_ENV) $(BIN_NEWEST)/python $(PYTEST)

notebooks: setup
	$(TEST_ENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/notebooks.py --check

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: setup
	$(BIN)/python scripts/benchmark.py
	$(BIN)/python scripts/benchmark_analyses.py
	$(BIN)/python scripts/benchmark_gradients.py

pins:
	rm -rf .venv-pins
	$(call create_venv,.venv-pins)
	.venv-pins/bin/python -m pip install $(PIP_ARGS) -c requirements/pinned.in ".[hooked,demo,sae,studies,dev]"
	grep '^#' requirements/pinned.txt > .venv-pins/pinned.txt
	.venv-pins/bin/python -m pip freeze --all --exclude pip --exclude tl-tangent \
		| sed 's/+.*//' >> .venv-pins/pinned.txt
	mv .venv-pins/pinned.txt requirements/pinned.txt
	rm -rf .venv-pins

clean:
	rm -rf $(VENV) $(VENV_NEWEST) .venv-pins $(OUT) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a second call installs nothing until the pins or pyproject.toml change.
$(VENV)/.pins: $(PINS)
	$(call create_venv,$(VENV))
	$(call install,$(BIN),requirements/pinned.txt)
	@touch $@

$(VENV_NEWEST)/.pins: $(NEWEST)
	$(call create_venv,$(VENV_NEWEST))
	$(call install,$(BIN_NEWEST),requirements/newest.txt)
	@touch $@

%/.package: %/.pins pyproject.toml
	$*/bin/python -m pip install $(PIP_ARGS) --no-deps --no-build-isolation -e .
	@touch $@

define create_venv
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 15) and \
		"Python 3.11 to 3.14 is needed and this is %d.%d; try: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(1)
endef

define install
	$(1)/python -m pip install $(PIP_ARGS) -r $(2)
	$(1)/python -m pip install $(PIP_ARGS) --no-deps -r requirements/embedded.txt
endef
