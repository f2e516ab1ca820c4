# `make train` and `make test` do all the set-up they need, alone and in either order. `make help` lists the rest.
VENV := .venv
BIN := $(VENV)/bin
FOLDERS := dsl planner runtime examples
NEEDS := Python 3.11, 3.12 or 3.13 (megatron-core has no wheel for others)
NAMED = make $(MAKECMDGOALS) PYTHON=/path/to/python3.12
SITE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The Python to build $(VENV) from: PYTHON=..., or the first of these for which megatron-core has a wheel (3.11 to 3.13).
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

# A Python of a given release, as a command or of pyenv; empty if there is none.
python_of = $(shell for p in python$(1) $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] != tuple(map(int, "$(1)".split("."))))' 2>/dev/null && echo $$p && break; done)

PYTHON312 ?= $(call python_of,3.12)
PYTHON313 ?= $(call python_of,3.13)

# The environment with pip alone, before the first installation into it is complete.
WITH_PIP := $(if $(wildcard $(VENV)/.ready),,$(VENV)/.pip)

# Where that Python keeps a torch that drives this machine's GPUs, if it has one. Such a torch was built for the driver,
# NCCL and Transformer Engine at hand, so we use it, whatever its version. Elsewhere the pinned torch is installed.
OWN_TORCH ?= $(shell $(PYTHON) -c 'import pathlib, torch; assert torch.cuda.is_available() and torch.__version__ >= "2.6"; \
    print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help train test checks lint types light unit newest parity faults fuzz findings format clean .venv .venv-newest .venv-newest-3.13 interrupted

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

train: .venv  ## the main job: plan and train a small GPT on the text of Python's standard library (ARGS="..." for options)
	@$(BIN)/megaloom train stdlib-gpt $(ARGS)

# mypy keeps one core busy for half a minute, and the tests do not need it: they run beside it.
test:  ## lint, types, the light installation and all tests
	@$(MAKE) --no-print-directory -j2 --output-sync=target light lint
	@$(MAKE) --no-print-directory -j2 types unit

checks:  ## `make test` without its tests
	@$(MAKE) --no-print-directory -j2 --output-sync=target light .venv
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint types

lint: .venv  ## ruff, its formatter, and the import rules between packages and folders
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports --no-logo

types: .venv  ## mypy, strict for dsl, planner and examples
	$(BIN)/python -m mypy

unit: .venv  ## pytest alone (ARGS="-n0 -k ..." for options)
	$(BIN)/python -m pytest $(ARGS)

light: $(WITH_PIP)  ## build the wheel, install it without torch into fresh environments (also Python 3.12 to 3.14, if here), and plan there
	@$(BIN)/python -m tests.support.light $(PYTHON312) $(PYTHON313) $(call python_of,3.14)

# Python 3.12 and later have the newest megatron-core (constraints.txt). These environments have torch for CUDA: 5 GB each.
newest: .venv .venv-newest .venv-newest-3.13  ## slow: all tests with the newest megatron-core (Python 3.12, 3.13), and its runs beside 0.16.1's
	$(MAKE) --no-print-directory VENV=.venv-newest unit
	$(BIN)/python -m tests.support.two_releases $(BIN) .venv-newest/bin
	$(MAKE) --no-print-directory VENV=.venv-newest-3.13 train ARGS="--steps 5 --out $$(mktemp -d)/run"
	$(MAKE) --no-print-directory VENV=.venv-newest-3.13 unit ARGS="-n0 tests/runtime/engine/test_parity.py -k 'bf16_computes or uneven_stages'"

.venv-newest:
	@$(MAKE) --no-print-directory VENV=$@ PYTHON="$(PYTHON312)" NEEDS="Python 3.12" NAMED="make newest PYTHON312=/path/to/python3.12" .venv

.venv-newest-3.13:
	@$(MAKE) --no-print-directory VENV=$@ PYTHON="$(PYTHON313)" NEEDS="Python 3.13" NAMED="make newest PYTHON313=/path/to/python3.13" .venv

parity: .venv  ## slow campaigns: golden predictions, built plans, brute force, families x layouts, own ops, 500 drawn layouts (continues)
	$(BIN)/python -m tests.support.golden --check
	$(BIN)/python benchmarks/built.py
	MEGALOOM_INSTANCES=500 $(BIN)/python -m pytest -n0 --timeout 0 tests/planner/search/test_brute_force.py
	$(BIN)/python -m tests.support.parity.family_table
	$(BIN)/python -m tests.support.parity.shard_table
	$(BIN)/python -m tests.support.parity.own_op_cases
	$(BIN)/python -m tests.support.parity.drawn

faults: .venv  ## slow campaign: runs are killed at 50 drawn moments and continued (continues where it stopped)
	$(BIN)/python -m tests.support.faults

fuzz: .venv  ## slow campaign: 10,000 damaged and odd inputs of all commands (continues where it stopped)
	$(BIN)/python -m tests.support.fuzz.campaign

findings: .venv  ## slow: reproductions of the findings of independent trials, as a table
	$(BIN)/python -m tests.support.findings.table

format: .venv  ## rewrite the sources as lint wants them
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:  ## remove everything that make made; runs/ stays
	rm -rf $(VENV) .venv-newest* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# pip compiles on one core, a third of the whole installation: compileall does so on all cores.
QUIETLY := -qq --disable-pip-version-check --no-compile -c $(VENV)/constraints.txt

# A third of all code, of which little is imported: Python compiles what is.
RARE := _inductor|django|kubernetes|mypyc?|pip|pygments/lexers|sklearn|sympy/physics|transformers/models|wandb
UNCOMPILED := /(tests|testing|$(RARE))/

.venv: $(VENV)/.ready $(VENV)/packages/megaloom

# Links to the folders under their installed names, for mypy, which does not follow the import hook of the installation.
$(VENV)/packages/megaloom: | $(VENV)/.ready
	@mkdir -p $@ && ln -sfn $(FOLDERS:%=../../../%) $@

# An environment with pip and setuptools. `light` needs no more, so `make test` runs it beside the installation of the rest.
# .installing exists until that is complete; if it was interrupted, the next `make` starts again.
$(VENV)/.pip: $(if $(wildcard $(VENV)/.installing),interrupted)
	@test -n "$(PYTHON)" || { echo "make needs $(NEEDS) and found none." \
	    "Install one, or name it: $(NAMED)" >&2; exit 1; }
	@echo "Installing into $(VENV) with $(PYTHON) (once; a minute, or several where torch comes with CUDA)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt setuptools
	@touch $@

$(VENV)/.ready: pyproject.toml setup.py constraints.txt | $(WITH_PIP)
	@touch $(VENV)/.installing && rm -f $@
	@cp constraints.txt $(VENV)
	@own="$(OWN_TORCH)"; test -z "$$own" || { echo "Using the torch in $$own"; \
	    echo "$$own" > $(SITE)/own_torch.pth; sed -i '/^torch==/d' $(VENV)/constraints.txt; }
	@$(BIN)/python -m pip install $(QUIETLY) --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j0 -x '$(UNCOMPILED)' $(SITE) || true  # some packages have templates that are no Python
	@$(BIN)/python -m compileall -q $(FOLDERS)  # also where commands may write nothing
	@mv $(VENV)/.installing $@ && touch $@
