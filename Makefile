# Every way to build, run and check specserve. `make` lists the targets; all of them set .venv up first.
#
#   PYTHON=python3.12        the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX=URL          take torch from this package index, e.g. for one CUDA version
#   TORCH_SPEC='torch==X'    another torch than constraints.txt pins (2.9 or newer)
#   ARGS='...'               passed on to pytest, or to `specserve serve`

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ARGS ?=

# Exactness is promised for one thread count; the tests and the CI use this one.
PYTEST := OMP_NUM_THREADS=2 $(PY) -m pytest

PROTOS := $(wildcard proto/specserve/v1/*.proto)
PROTOC := $(PY) -m grpc_tools.protoc -I proto $(PROTOS)
NATIVE_SOURCES := $(wildcard $(addprefix kernels/specserve_kernels/cpu/,native.py csrc/*))

.PHONY: help setup demo serve test check proto check-proto kernels exactness sim bench FORCE

help: ## list the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: setup ## answer one real prompt over gRPC, with speculation on and off
	@$(PY) -m specserve.cli pull demo
	@$(PY) -m specserve.cli demo

serve: setup ## start the gRPC server, e.g. make serve ARGS='--model demo --port 50051'
	@$(PY) -m specserve.cli serve $(ARGS)

test: setup ## all tests but the long ones
	$(PYTEST) -m "not slow" --durations=15 $(ARGS)

check: setup ## format, lint, types, structure, generated code up to date
	@echo "== ruff"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@echo "== mypy"
	@$(PY) -m mypy
	@echo "== structure"
	@$(PY) -m pytest tests/structure
	@$(MAKE) check-proto

kernels: setup ## every kernel test, the long ones too
	$(PYTEST) tests/kernels --durations=15 $(ARGS)

exactness: setup ## the whole matrix: on = off, id for id, in every environment of this machine (long)
	$(PYTEST) -m slow --ignore=tests/kernels --durations=15 --verbose $(ARGS)
	@for kernels in native torch; do for threads in 1 2; do for cpu in best avx2; do \
	  echo "== environment: kernels $$kernels, threads $$threads, torch's cpu capability $$cpu"; \
	  cpu=$${cpu/best/}; \
	  env $${cpu:+ATEN_CPU_CAPABILITY=$$cpu} OMP_NUM_THREADS=$$threads SPECSERVE_TEST_THREADS=$$threads \
	    SPECSERVE_TEST_KERNELS=$$kernels $(PY) -m pytest -m "not slow and not demo" tests/exactness/test_matrix.py || exit 1; \
	done; done; done
	@for isa in plain avx512; do \
	  echo "== environment: native kernels limited to $$isa"; \
	  SPECSERVE_NATIVE_ISA=$$isa SPECSERVE_TEST_KERNELS=native $(PY) -m pytest -m "not slow and not demo" \
	    tests/exactness/test_matrix.py tests/kernels/test_row_invariance.py || exit 1; \
	done
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) tests/kernels/test_row_invariance.py

sim: setup ## the engine under scripted faults with a hash for a model, about a minute, e.g. make sim ARGS='--steps 1e6'
	OMP_NUM_THREADS=1 $(PY) -m specserve.cli sim --seed 1 --steps 25000 $(ARGS)

bench: setup ## measure steps, latency and serving, about ten minutes on an idle machine; writes bench/results
	$(PY) bench/step.py --seconds 2
	$(PY) bench/latency.py --per-category 2
	$(PY) bench/serve.py
	$(PY) bench/summary.py

proto: setup ## regenerate specserve/v1 from proto/
	@test -n "$(PROTOS)" || { echo "no .proto file in proto/specserve/v1" >&2; exit 1; }
	@$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=.
	@echo "regenerated specserve/v1 from: $(PROTOS)"

check-proto: setup
	@echo "== proto"
	@test -n "$(PROTOS)" || { echo "no .proto file in proto/specserve/v1" >&2; exit 1; }
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh"; \
	diff -r --exclude=__init__.py --exclude=__pycache__ specserve/v1 "$$fresh/specserve/v1" || \
	  { echo "specserve/v1 does not match proto/; run 'make proto' and commit the result" >&2; exit 1; }; \
	echo "specserve/v1 is what proto/ generates"

# ---- set-up: done once, again when pyproject.toml, constraints.txt or the choice of torch changes ----------------

# Named after the content it was made from: a fresh checkout of the same files needs no new install.
READY := .venv/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
NATIVE := .venv/.native

ifneq ($(TORCH_SPEC)$(TORCH_INDEX),)
OWN_TORCH := $(TORCH_SPEC) $(TORCH_INDEX)
ifneq ($(strip $(OWN_TORCH)),$(strip $(shell cat .venv/.own-torch 2>/dev/null)))
$(READY): FORCE
TORCH_FLAGS := --force-reinstall
endif
endif
TORCH_SPEC ?= $(shell sed -n '/^torch==/p' constraints.txt)

setup: $(READY) $(NATIVE) ## make .venv with everything in it (the other targets call it)
	@:

.venv/bin/pip:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "specserve needs Python 3.11 or newer, and there is no '$(PYTHON)' here. Install one, or name yours:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specserve needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Name a newer one, for example:" \
	    "make PYTHON=python3.12" >&2; exit 1; }
	@echo "== set-up 1/4: .venv ($$($(PYTHON) -V))"
	@$(PYTHON) -m venv .venv || \
	  { echo "cannot make a virtual environment; on Debian and Ubuntu 'apt install python3-venv' brings what is" \
	    "missing" >&2; exit 1; }

# torch goes first and alone, so that nothing else picks a build of it; the pins then keep the one that is there.
$(READY): | .venv/bin/pip
	@rm -f .venv/.ready-* .venv/.own-torch
	@grep -vE '^(torch|triton)==' constraints.txt > .venv/pins.txt
	@echo "== set-up 2/4: $(TORCH_SPEC)$(if $(TORCH_INDEX), from $(TORCH_INDEX))"
	@$(PIP) install $(TORCH_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),--constraint .venv/pins.txt) '$(TORCH_SPEC)'
	@for name in torch triton; do \
	  $(PIP) freeze | grep "^$$name==" || grep "^$$name==" constraints.txt; done >> .venv/pins.txt
	@echo "== set-up 3/4: specserve and what it needs"
	@$(PIP) install --constraint .venv/pins.txt --editable '.[dev]'
	@$(if $(OWN_TORCH),echo '$(OWN_TORCH)' > .venv/.own-torch)
	@touch $@

$(NATIVE): $(READY) $(NATIVE_SOURCES)
	@echo "== set-up 4/4: native CPU kernels"
	@$(PY) -m specserve_kernels.cpu.native || \
	  echo "The native CPU kernels were not built (the lines above say why). specserve runs without them, on torch's" \
	    "own operations, which are slower."
	@touch $@

FORCE:
