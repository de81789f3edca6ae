# Two commands do all their own set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast matrix check bench golden docs gpu clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev,demo,report,tensorboard]'
	touch $@

demo: $(READY)  ## Train on real text with 2 ranks (zero3), save, and write a few words with the result
	$(BIN)/python examples/prepare_demo.py
	$(BIN)/shardwright train examples/demo.yaml --nproc-per-node 2
	$(BIN)/python examples/generate.py demo/run/model

test: $(READY)  ## All tests, two files at a time: ranks that wait for each other leave a core free
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(READY)  ## One to two minutes on two cores; its last lines say what it leaves out
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m "not slow" $(ARGS)

matrix: $(READY)  ## `make test` with other instruction sets, libraries and numbers of threads, in one table; hours
	$(BIN)/python -m tests.matrix $(ARGS)

check: $(READY)  ## Lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

bench: $(READY)  ## Side by side with bare torch, in one run
	$(BIN)/python benchmarks/data_parallel.py

golden: $(READY)  ## Write the golden losses anew, or add the bits of this machine; a change needs a reason in docs/decisions
	$(BIN)/python -m tests.golden.losses

docs: $(READY)  ## Write docs/modules.md anew from the docstrings
	$(BIN)/python docs/module_list.py

gpu:  ## On a machine with GPUs, with its own Python and torch: ten minutes, one table, one JSON; installs nothing
	$(PYTHON) benchmarks/gpu.py $(ARGS)

clean:
	rm -rf $(VENV) demo runs
