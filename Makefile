# `make demo` and `make test` need nothing but Python and a network: both create .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Some hundred processes are started by the tests: each need not compile all modules anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test nightly lint bench clean

demo: $(STAMP)
	$(BIN)/python jobs/elastic_train.py

# In several processes, which hold up each other: limits in seconds are twice as long (tests/slack.py).
test: $(STAMP)
	RAY_DCP_TEST_SLACK=$${RAY_DCP_TEST_SLACK:-2} $(BIN)/python -m pytest -n auto

# What takes too long for every commit: ten thousand new interleavings and damaged files, and whatever is marked slow.
nightly: $(STAMP)
	RAY_DCP_INTERLEAVINGS=10000 RAY_DCP_MUTATIONS=10000 RAY_DCP_STATES=10000 $(BIN)/python -m pytest -m "nightly or slow or soak" --timeout=10800

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python benchmarks/compare.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-other build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
