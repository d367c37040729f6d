# The doors to tasuki. Everything runs in .venv, which the first target that needs it builds.
# Every target is phony: one named like a folder would be skipped silently otherwise.
.PHONY: help venv up test soak chaos lint bench proto clean
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?=
UP_FLAGS ?=
TEST_FLAGS ?=
JOBS ?= 2

BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -q --durations=10 $(TEST_FLAGS)
STAMP := .venv/.stamp
CODE := $(wildcard tasuki prefill decode router experiments cli tests benchmarks)
PROTOS := $(wildcard proto/tasuki/v1/*.proto)
# protoc finds the plugin that writes typed stubs on PATH.
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto

help:
	@echo "make up      start a router, a prefill worker and a decode worker here, ask one question,"
	@echo "             and stay up until Ctrl-C. UP_FLAGS='--prefill 2' adds flags of 'tasuki up'."
	@echo "make test    run the tests. TEST_FLAGS='-k handoff' adds flags of pytest; JOBS=4: on as many cores."
	@echo "make soak    the long tests: whole streams of the demo model, ten thousand requests, and"
	@echo "             a cluster under load for an hour, which must not grow"
	@echo "make chaos   faults under load: a minute of every kind, and a thousand requests; as root"
	@echo "             also workers in network namespaces, whose wire is narrowed or cut"
	@echo "make lint    style, types, import floors, and whether the generated stubs are current"
	@echo "make bench   speed against peers and against this machine's limits"
	@echo "make venv    build .venv and nothing else"
	@echo "make proto   regenerate tasuki/v1 from proto/"
	@echo "make clean   remove .venv and all caches in this folder"
	@echo
	@echo "Variables:"
	@echo "  PYTHON=python3.12   the Python to build .venv with; 3.11 or newer"
	@echo "  TORCH_INDEX=URL     on Linux, plain pip brings PyTorch with several GB of CUDA libraries."
	@echo "                      PyTorch also offers builds for the CPU alone, on a package index of its"
	@echo "                      own: its 'Get Started' page shows the address (choose Linux, Pip, CPU)."
	@echo "                      Given here, torch comes from there, and all else from the usual place."

venv: $(STAMP)

# The stamp is written last: an environment without one is half-made, and is built anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tasuki needs Python 3.11 or newer; '$(PYTHON)' is not. On Debian 12 or newer:"; \
	  echo "  apt-get install -y python3 python3-venv    (or: make PYTHON=/path/to/python3.11)"; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "tasuki needs Python's venv module, which '$(PYTHON)' lacks. On Debian or Ubuntu:"; \
	  echo "  apt-get install -y python3-venv"; \
	  exit 1; }
	@if [ ! -f $(STAMP) ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	  rm -rf .venv && $(PYTHON) -m venv .venv; fi
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --index-url "$(TORCH_INDEX)" -c constraints.txt torch; fi
	@echo "Installing into .venv; the first time takes minutes, most of it for torch."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# Ends in exec, and tells `tasuki up` who make is: SIGKILL of make then stops the cluster too.
up: $(STAMP)
	@TASUKI_DIE_WITH_PARENT=$$PPID exec $(BIN)/tasuki up --demonstrate --log-dir build/logs $(UP_FLAGS)

# First those that start no processes, as many at once as there are JOBS; then the others, which use
# several cores by themselves, one after another. 5: TEST_FLAGS left none of them.
test: $(STAMP)
	@$(PYTEST) -n $(JOBS) --dist loadfile -m "not dist and not chaos and not soak" || [ $$? -eq 5 ]
	@$(PYTEST) -m "dist and not chaos and not soak" || [ $$? -eq 5 ]

soak: $(STAMP)
	@$(PYTEST) -m soak

chaos: $(STAMP)
	@$(PYTEST) -s -m chaos

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(CODE)
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" \
	  --mypy_out="$$fresh" --mypy_grpc_out="$$fresh" $(PROTOS) >/dev/null && \
	diff -r -x __init__.py -x __pycache__ "$$fresh/tasuki/v1" tasuki/v1 || { \
	  echo "tasuki/v1 differs from what proto/ says; run: make proto"; exit 1; }

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

proto: $(STAMP)
	$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
