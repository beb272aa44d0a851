# `make help` lists the targets. CMakeLists.txt has the build; this file has the ways to use it.

PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
# The CUDA backend: AUTO (where nvcc is found), ON or OFF.
CUDA ?= AUTO
EXAMPLE := examples/data/minilm.safetensors

.PHONY: build setup setup-tests setup-gates demo test gates format bench clean help
.NOTPARALLEL: # apt-get and pip run once at a time

build: setup ## build build/libfdma.so, build/libfdma.a and the command build/fdma (CUDA=OFF: for the CPU alone)
	@cmake --preset release -DFDMA_CUDA=$(CUDA) >/dev/null
	@cmake --build --preset release -j $(JOBS)

setup: ## install what the build needs and this machine lacks
	@tools/setup.sh

setup-tests:
	@tools/setup.sh tests

setup-gates:
	@tools/setup.sh gates

demo: ## build, then attend over the keys of a real model
	@echo "== set-up: compiler, cmake, ninja, cJSON"
	@$(MAKE) --no-print-directory setup
	@echo "== build: library and command"
	@cmake --preset release $(if $(wildcard build/build.ninja),,-DFDMA_CUDA=OFF) >/dev/null
	@cmake --build --preset release -j $(JOBS) --target fdma_tool
	@echo "== bidirectional, as the model does: build/fdma attend $(EXAMPLE) --window 64"
	@build/fdma attend $(EXAMPLE) --window 64
	@echo "== causal: build/fdma attend $(EXAMPLE) --window 64 --causal"
	@build/fdma attend $(EXAMPLE) --window 64 --causal

test: setup-tests build ## run every test, those in C and those in Python
	@status=0; \
	echo "== C tests"; \
	ctest --test-dir build --output-on-failure --no-tests=error -j $(JOBS) || status=1; \
	echo "== Python tests"; \
	FDMA_LIBRARY=$(CURDIR)/build/libfdma.so FDMA_TOOL=$(CURDIR)/build/fdma PYTHONPATH=python \
		OMP_WAIT_POLICY=passive $(PYTHON) -m pytest tests/python -q || status=1; \
	exit $$status

gates: setup-gates build ## run what guards the code's form: warnings, sanitizers, valgrind, NEON, arrows, sizes, fuzzers
	@tools/gates/run.sh

format: setup-tests ## format all C and Python
	@tools/gates/format.sh --fix

bench: build ## measure; BENCH takes the command's options, such as BENCH="forward/dense --threads 1"
	@build/fdma bench $(BENCH)

clean: ## remove everything that was built
	@rm -rf build

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | expand -t 10
