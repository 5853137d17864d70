# `make demo` and `make test` are all that a newcomer needs; each makes the environment first where it is missing.
SHELL := bash
HAL_VENV ?= .venv
BIN := $(HAL_VENV)/bin
export HAL_VENV

SOURCES := $(wildcard hal ops model engine conformance backends examples benchmarks tests)

.PHONY: demo test lint format clean
.NOTPARALLEL:

demo:
	@./env.sh
	$(BIN)/hal generate -p "Hello" --max-tokens 32

test:
	@./env.sh test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint:
	@./env.sh test lint
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format:
	@./env.sh test lint
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
