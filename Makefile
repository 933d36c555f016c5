# `make test` and `make demo` need python3 (3.10 or later) with venv and pip, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that run tests; much of a test is waiting.
JOBS ?= 2

.PHONY: test demo lint chaos simulate clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt "torch" "scikit-build-core>=0.10"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[test,notebook]"
	touch $@

test: lint
	$(BIN)/python -m pytest --nbval notebooks --nbval-cell-timeout=300 -p no:cacheprovider
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(STAMP)
	$(BIN)/python examples/digits.py

# Faults of all kinds on real workers, at random: make chaos MINUTES=20 SEED=1
MINUTES ?= 1
SEED ?= 1
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

# Schedules of the whole control plane over a simulated network: make simulate N=200000
N ?= 10000
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(N)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
