# Few verbs. `make setup` first, or let the others call it.
PYTHON_VENV := .venv/bin/python

SIM_STATES := 20000
# Processes that run the tests, a file each: twice as many would want twice the memory.
TEST_PROCESSES := 2

.PHONY: help setup demo test check sim bench clean

help:  ## this list
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup:  ## system packages, .venv/, the native core; quick when nothing changed
	@tools/setup

demo: setup  ## a store, a model's KV cache, a restart: see it work
	@.venv/bin/blockkv demo

test:  ## lint, types, layers and every test, engines too, as CI runs them
	@tools/setup --test
	@tools/engines all
	@$(MAKE) --no-print-directory check
	@$(PYTHON_VENV) -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder
	@$(MAKE) --no-print-directory sim

check: setup  ## lint, types, layers only
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m mypy
	@$(PYTHON_VENV) -m pytest --quiet tests/test_layers.py tests/test_tidy.py

sim: setup  ## crash the store SIM_STATES times, with a fresh seed
	@$(PYTHON_VENV) tools/crash_explorer.py --states $(SIM_STATES) --mutant none

bench: setup  ## throughput and CPU beside fio, on a device in memory paced like a drive (root)
	@$(PYTHON_VENV) tools/fio_compare.py --paced

clean:  ## remove .venv/ and everything built
	@rm -rf .venv .engines build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -f native/_native.c blockkv/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
