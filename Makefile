# Everything a fresh machine needs: Python 3.10 or newer, and make.
PYTHON ?= python3
# The torch build under test; any version the package accepts may be named here.
TORCH ?= torch==2.13.0
VENV ?= .venv
COMPAT ?= .venv-compat
# The oldest transformers that the package accepts, and further releases that `make matrix` tries.
OLDEST ?= 5.15.0
RELEASES ?= $(OLDEST) 5.17.0 5.19.0
# Other builds of torch and other interpreters that `make matrix` tries, each in its own environment; empty for none. A torch
# is tried with the oldest transformers, an interpreter (a command, such as python3.13) with what pip chooses for it.
TORCHES ?= 2.6.0
PYTHONS ?=
# Further requirements of an environment.
PINS ?=
BIN := $(VENV)/bin
# Test processes at a time; each uses one thread.
JOBS ?= 2
# A file stays in one process, so that its fixtures run once. Files start in order: by default those with the fewest tests
# come last, and some of these take the longest.
SHARED := --dist loadfile --no-loadscope-reorder
# What `make test` runs against the oldest transformers; `make matrix` runs the other compat tests too.
SUBSET ?= compat and not slow and not matrix
# Bytecode is written even where the caller's environment says otherwise: the test processes share it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all matrix suite dist lint oldest docs clean

demo: $(VENV)/.ready  ## generate text with the embedded pair, plain and speculative
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready  ## lint, types, a subset on the oldest transformers, the suite on the newest
	$(MAKE) --no-print-directory -j 2 lint oldest
	$(BIN)/python -m pytest -n $(JOBS) $(SHARED) -m "not slow"

test-all: $(VENV)/.ready  ## the same, with the long tests
	$(MAKE) --no-print-directory -j 2 lint oldest SUBSET=compat
	$(BIN)/python -m pytest -n $(JOBS) $(SHARED)

matrix: $(VENV)/.ready  ## the tests for several releases of transformers and torch, each in its own environment
	@for release in $(RELEASES); do \
		$(MAKE) --no-print-directory COMPAT=.venv-$$release OLDEST=$$release .venv-$$release/.ready && \
		.venv-$$release/bin/python -m pytest -n $(JOBS) $(SHARED) -m "compat and not slow" || exit 1; \
	done
	@for torch in $(TORCHES); do \
		$(MAKE) --no-print-directory suite VENV=.venv-torch-$$torch TORCH=torch==$$torch PINS=transformers==$(OLDEST) || exit 1; \
	done
	@for python in $(PYTHONS); do \
		$(MAKE) --no-print-directory suite VENV=.venv-$${python##*/} PYTHON=$$python TORCH=torch || exit 1; \
	done
	$(MAKE) --no-print-directory suite

suite: $(VENV)/.ready  ## all tests but the slow ones, in one environment
	$(BIN)/python -m pytest -n $(JOBS) $(SHARED) -m "not slow"

dist: $(VENV)/.ready  ## the wheel and the source archive, checked
	$(BIN)/python -m pip install -q -e ".[release]"
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

oldest: $(COMPAT)/.ready  ## the tests of a subset on the oldest transformers
	$(COMPAT)/bin/python -m pytest -n $(JOBS) $(SHARED) -m "$(SUBSET)"

docs: $(VENV)/.ready
	$(BIN)/python -m pip install -q -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# --no-compile: pip would compile every file of every package, which takes longer than to install them. Python compiles
# those that are imported.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile "$(TORCH)" $(PINS) -e ".[test,plot]"
	touch $@

# All packages of the first environment, except transformers and what it needs in other versions.
$(COMPAT)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv --clear --without-pip $(COMPAT)
	$(BIN)/python -c "from sysconfig import get_path; print(f'import site; site.addsitedir({get_path(\"purelib\")!r})')" \
		> $$($(COMPAT)/bin/python -c "from sysconfig import get_path; print(get_path('purelib'))")/newest.pth
	$(BIN)/python -m pip --python $(COMPAT) install -q --no-compile "transformers==$(OLDEST)"
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT) .venv-* dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
