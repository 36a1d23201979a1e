# For newcomers: `make quickstart`, `make swarm-demo`, `make demo`. Everything else is for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: quickstart swarm-demo demo test docs bench bench-gpu clean help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.installed ## see the paper's effect on this machine: 7 to 11 minutes after installing
	$(BIN)/layershuffle reproduce digits-quick --out runs/digits-quick

swarm-demo: $(VENV)/.swarm-installed ## kill a third of a swarm's hosts and watch it answer: half a minute after installing
	$(BIN)/layershuffle swarm demo

demo: $(VENV)/.swarm-installed ## take a model apart on a page, and watch it answer: seconds after installing
	$(BIN)/layershuffle demo

test: $(VENV)/.tests-installed ## lint, types, documentation and the test suite
	scripts/check

docs: $(VENV)/.tests-installed ## build the documentation as a site: build/site/index.html
	scripts/docs

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "layershuffle needs Python 3.11 or newer; name one: make PYTHON=python3.11 ...")'
	@echo "Installing (6.5 GB, most of it torch with its GPU libraries; 2 to 5 minutes) ..."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[study]'
	touch $@

$(VENV)/.swarm-installed: pyproject.toml host/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ./host
	$(PIP) --editable '.[swarm]'
	touch $@

$(VENV)/.tests-installed: pyproject.toml host/pyproject.toml browser/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ./host
	$(PIP) --editable ./browser
	$(PIP) --editable '.[test]'
	touch $@

CLAIMS := $(filter-out benchmarks/_%.py benchmarks/gpu.py,$(wildcard benchmarks/*.py))

bench: $(VENV)/.tests-installed ## measure every CPU claim of docs/performance.md; claims.csv says how long it took
	@for claim in $(CLAIMS); do \
	  echo "== $$claim"; OMP_NUM_THREADS=1 $(BIN)/python $$claim || missed="$$missed $$claim"; \
	done; \
	$(BIN)/python scripts/tables.py; \
	test -z "$$missed" || { echo "Promises not kept:$$missed"; exit 1; }

# No network where this environment, or $(PYTHON), has the package already.
bench-gpu: ## measure the GPU claims: one NVIDIA GPU, under 10 minutes, no network
	@for python in $(BIN)/python $(PYTHON); do \
	  $$python -c 'import layershuffle.training.job' 2>/dev/null && break; python=; \
	done; \
	test -n "$$python" || { $(MAKE) $(VENV)/.tests-installed && python=$(BIN)/python; } || exit; \
	$$python benchmarks/gpu.py; code=$$?; $$python benchmarks/rounds.py || code=$$?; \
	$$python scripts/tables.py; exit $$code

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
