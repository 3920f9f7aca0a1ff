# Caudal. `make chat` on a fresh machine does everything; see `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
JOBS ?= $(shell nproc)
CPP := $(wildcard native/*/*.cpp native/*/*.h native/*/*.inl)
NATIVE := CMakeLists.txt $(CPP)
SANITIZED := build/sanitized
ARM := build/aarch64
OPTIMISED := build/optimised
PYTEST_ARGS ?=

.PHONY: help chat serve test lint format stubs docs native-test native-test-arm check-objects model clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

chat: $(VENV)/.installed  ## Set everything up and talk with the default model
	@$(BIN)/caudal chat

serve: $(VENV)/.installed  ## Serve the default model on 127.0.0.1:8000
	@$(BIN)/caudal serve

test: $(VENV)/.installed $(VENV)/.test model  ## Set up and run all tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

model: $(VENV)/.installed  ## Fetch the default model and check its digest
	@$(BIN)/caudal pull

lint: $(VENV)/.installed $(VENV)/.test $(VENV)/.dev  ## Check format, style and types
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/clang-format --dry-run -Werror $(CPP) $(wildcard bench/*.cpp)
	@$(BIN)/pyright
	@echo "lint: clean"

format: $(VENV)/.dev  ## Format the Python and the C++
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CPP) $(wildcard bench/*.cpp)

stubs: $(VENV)/.installed $(VENV)/.dev  ## Write the type stub of the native module anew
	@$(BIN)/python -m nanobind.stubgen --quiet -m caudal._native -o src/caudal/_native.pyi
	@$(BIN)/ruff format --quiet src/caudal/_native.pyi

docs: $(VENV)/.installed  ## Write docs/cli.md anew
	@$(BIN)/python docs/generate_cli.py

native-test: $(VENV)/.build-tools  ## Build the native tests with sanitizers and run them
	@echo "» Building the native tests (AddressSanitizer, UndefinedBehaviorSanitizer) ..."
	@PATH="$$PWD/$(BIN):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Debug \
		-DCAUDAL_PYTHON=OFF -DCAUDAL_TESTS=ON -DCAUDAL_SANITIZE=ON -DCAUDAL_WERROR=ON >/dev/null
	@PATH="$$PWD/$(BIN):$$PATH" cmake --build $(SANITIZED) -j $(JOBS) >$(SANITIZED)/build.log \
		|| { tail -40 $(SANITIZED)/build.log; exit 1; }
	@$(SANITIZED)/caudal_tests

native-test-arm: $(VENV)/.build-tools  ## Build the native tests for 64-bit ARM and run them in an emulator
	@for program in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$program >/dev/null \
		|| { echo "$$program is missing: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }; done
	@echo "» Building the native tests for 64-bit ARM ..."
	@PATH="$$PWD/$(BIN):$$PATH" cmake -S . -B $(ARM) -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DCAUDAL_PYTHON=OFF -DCAUDAL_TESTS=ON \
		-DCAUDAL_WERROR=ON >/dev/null
	@PATH="$$PWD/$(BIN):$$PATH" cmake --build $(ARM) -j $(JOBS) >$(ARM)/build.log \
		|| { tail -40 $(ARM)/build.log; exit 1; }
	@run() { qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$$@"; }; \
	expect() { \
		echo "» Emulating $$1, which has $$2 ..."; \
		run $$1 $(ARM)/caudal_tests --test-case='instruction sets: *' | grep -qx ".*of this CPU: $$2" \
			|| { echo "$$1: other instruction sets were chosen"; exit 1; }; \
	}; \
	for cpu in cortex-a72:'reference neon' neoverse-n1:'reference neon neon-dotprod'; do \
		expect $${cpu%%:*} "$${cpu#*:}"; \
		run $${cpu%%:*} $(ARM)/caudal_tests --test-case='*instruction set*'; \
	done; \
	expect max 'reference neon neon-dotprod neon-i8mm'; \
	run max $(ARM)/caudal_tests

check-objects: $(VENV)/.build-tools  ## Check the kernels' object files: sums in registers, nothing shared
	@PATH="$$PWD/$(BIN):$$PATH" cmake -S . -B $(OPTIMISED) -G Ninja -DCMAKE_BUILD_TYPE=Release -DCAUDAL_PYTHON=OFF >/dev/null
	@PATH="$$PWD/$(BIN):$$PATH" cmake --build $(OPTIMISED) -j $(JOBS) >$(OPTIMISED)/build.log \
		|| { tail -40 $(OPTIMISED)/build.log; exit 1; }
	@$(BIN)/python native/check_objects.py $(OPTIMISED)

clean:  ## Remove the environment and everything built; models stay
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp says that its step has been done with the files that it depends on.

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Caudal needs Python 3.11 or newer: apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "» Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.build-tools: $(VENV)/.created
	@command -v "$${CXX:-g++}" >/dev/null \
		|| { echo "The native core needs a C++20 compiler: apt-get install g++"; exit 1; }
	@$(BIN)/python -c 'import pathlib, sys, sysconfig; \
		sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
		|| { echo "The native core needs Python's headers: apt-get install python3-dev"; exit 1; }
	@echo "» Installing the build tools ..."
	@$(PIP) install 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.20' ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.build-tools pyproject.toml $(NATIVE)
	@echo "» Installing Caudal and building its native core, optimised (a minute or two) ..."
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-build-isolation --editable .
	@touch $@

$(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.created pyproject.toml
	@echo "» Installing the packages for '$*' ..."
	@$(BIN)/python -c 'import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb")); \
		print("\n".join(extras["project"]["optional-dependencies"][sys.argv[1]]))' $* \
		| $(PIP) install --requirement /dev/stdin
	@touch $@
