# `make` lists the targets.  Running a target again is quick.

PYTHON ?= python3
ARGS    =
ROUNDS  = 20
PARALLEL = -n auto --dist loadfile --no-loadscope-reorder

VENV   := .venv
RUN    := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-cells test-steady lint types clean

help:       ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS=\"extra options of the command\"] [ROUNDS=20]"
	@sed -n 's/^\([a-z-]*\): .*## \(.*\)/  \1 - \2/p' Makefile | awk -F ' - ' '{ printf "%-11s  %s\n", $$1, $$2 }'

demo: $(VENV)/demo.stamp  ## install splitc into .venv and train a small model on the ranks of this machine
	@echo "demo: plan, compile and train a small model on this machine"
	@$(VENV)/bin/splitc demo $(ARGS)

test: $(VENV)/dev.stamp  ## run the everyday tests
	@echo "test: the everyday tests"
	@$(RUN) pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/dev.stamp  ## run all tests, including slow ones; of large matrices every third cell
	@echo "test-all: all tests, including slow ones"
	@$(RUN) pytest $(PARALLEL) -m "" $(ARGS)

test-cells: $(VENV)/dev.stamp  ## run all tests, with every cell of their matrices
	@echo "test-cells: all tests, with every cell of their matrices"
	@SPLITC_CELLS=all $(RUN) pytest $(PARALLEL) -m "" $(ARGS)

test-steady: $(VENV)/dev.stamp  ## run the tests that start threads or processes ROUNDS times, until one fails
	@for round in $$(seq $(ROUNDS)); do \
		echo "test-steady: round $$round of $(ROUNDS)"; \
		$(RUN) pytest -q -x $(PARALLEL) -m "ranks or processes" $(ARGS) || \
			{ echo "test-steady: failed in round $$round of $(ROUNDS)" >&2; exit 1; }; \
	done

lint: $(VENV)/dev.stamp  ## check style and form with ruff
	@echo "lint: ruff check, ruff format --check"
	@$(RUN) ruff check
	@$(RUN) ruff format --check

types: $(VENV)/dev.stamp  ## check types with mypy
	@echo "types: mypy, strict"
	@$(RUN) mypy

clean:      ## remove .venv, build/ and the caches
	@echo "clean: remove .venv, build, dist and the caches"
	@rm -rf .venv build splitc-demo dist splitc.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file records that .venv satisfies pyproject.toml and constraints.txt.
$(VENV)/demo.stamp: EXTRAS := demo
$(VENV)/dev.stamp:  EXTRAS := dev,demo

$(VENV)/demo.stamp: pyproject.toml constraints.txt
	$(install)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	$(install)
	@touch $(VENV)/demo.stamp $@

define install
@command -v $(PYTHON) >/dev/null || { \
	echo "splitc: $(PYTHON) not found; select another: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "splitc: needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
		"select another: make PYTHON=python3.12" >&2; exit 1; }
@echo "install: splitc[$(EXTRAS)] into $(VENV); fetching torch takes a minute or two the first time"
@$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
@$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
endef
