# Every target creates the environment if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
LATEST := .venv-latest
LOWEST := .venv-lowest
SIGN := .venv-sign
STAMP := $(VENV)/.stamp
# Without --no-compile, pip compiles all of torch and transformers: 29 CPU seconds. Python compiles what is imported, and
# has to keep it: where the environment forbids that, as many container images do, each start costs 6 CPU seconds more.
export PYTHONDONTWRITEBYTECODE =
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
export HF_HUB_OFFLINE ?= 1
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
.DEFAULT_GOAL := help

.PHONY: help setup demo wheel wheel-runs sbom sign image test test-proofs test-engines test-release test-models test-latest test-lowest test-outages test-gpu campaign lint type bench docs site clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedfm needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a few minutes) ..."
	@$(BIN)/python $(INSTALL) -c constraints.txt torch
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.stamp-run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedfm needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -e $(STAMP) || echo "Installing what a run needs into $(VENV) (once; a minute) ..."
	@test -e $(STAMP) || $(BIN)/python $(INSTALL) -c constraints.txt -e .
	@touch $@

demo: $(VENV)/.stamp-run ## the built-in example and its baselines
	@$(BIN)/fedfm demo

wheel: $(VENV)/.stamp-run ## the file in dist/ that other machines install
	@rm -f dist/fedfm-*.whl # of an earlier version
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

wheel-runs: ## build sdist and wheel, install the wheel alone in a new environment, run it
	PYTHON=$(PYTHON) release/wheel_runs.sh

sbom: $(VENV)/.stamp-run ## what an installation has, with licences, as CycloneDX, into dist/
	@$(BIN)/python release/sbom.py

sign: ## sign what is in dist/, KEY=key.pem, as a Sigstore bundle
	@test -n "$(KEY)" || { echo "make sign KEY=key.pem: a private key on P-256; SECURITY.md says how to make one"; exit 2; }
	@test -x $(SIGN)/bin/python || $(PYTHON) -m venv $(SIGN)
	@$(SIGN)/bin/python $(INSTALL) -r release/signing.txt
	@release/sign.sh $(SIGN)/bin/python $(KEY)

image: ## a container image for the machines of a federation, where Docker is
	docker build --tag fedfm:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) .

test: $(STAMP) ## the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

$(VENV)/.stamp-engines: $(STAMP)
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev,simulation]'
	@touch $@

test-proofs: $(STAMP) ## what takes seconds: encrypted runs, attacks by repeated draws, kills; other values of quick tests
	$(BIN)/python -m pytest -m 'proof and not release' -n 2 --dist worksteal

test-engines: $(VENV)/.stamp-engines ## tests on Flower's simulation and on a SuperLink with SuperNodes
	$(BIN)/python -m pytest -m '(simulation or deployment) and not release' -n 2 --dist worksteal

test-release: $(VENV)/.stamp-engines test-models test-outages ## what a release needs beside .ci/run: longer, larger, more often
	@$(BIN)/python $(INSTALL) -c constraints.txt nbclient ipykernel # they run notebooks
	$(BIN)/python -m pytest -m release -n 2 --dist worksteal

test-models: $(STAMP) ## all families of models with all tasks and adaptations, into docs/reference/models.md
	$(BIN)/python -m pytest -m 'models or not models' tests/zoo -n 2 --dist worksteal --zoo-results tests/zoo/results.json; \
	found=$$?; $(BIN)/python docs/generate.py && exit $$found

test-latest: ## the test suite with the newest libraries that pyproject.toml admits, in an environment of its own
	@test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e '.[dev]'
	$(LATEST)/bin/python -m pytest -n 2 --dist worksteal

# Each of these touches several libraries; the rest of the suite repeats what they use.
LOW_EXTRAS := flower accounting hub partitioners encrypted tensorboard mlflow seq2seq audio vision quantized completion
LOW_TESTS := tests/linalg tests/data tests/privacy tests/models/test_mixtures.py tests/models/test_quantised.py \
	tests/models/test_model_export.py tests/models/test_model_inputs.py tests/models/test_merged_export.py \
	tests/engines/test_private_api.py tests/encrypted/test_ckks.py tests/docs/test_gallery.py

test-lowest: $(STAMP) ## part of the test suite with the lowest versions that pyproject.toml admits, in an environment of its own
	@$(BIN)/python release/lowest.py
	@test -x $(LOWEST)/bin/python || $(BIN)/uv venv --quiet --python $(PYTHON) $(LOWEST)
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml $(LOW_EXTRAS:%=--extra %)
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python -c constraints.txt pytest pytest-xdist hypothesis jsonschema
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps -e .
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal -m 'not simulation and not outage and not gpu and not models and not release' $(LOW_TESTS)

test-outages: $(STAMP) ## silos and servers that are killed and come back
	$(BIN)/python -m pytest -m outage tests/engines tests/sites

test-gpu: $(STAMP) ## what only a GPU shows, where there is one
	FEDFM_TESTS_SEE_GPUS=1 $(BIN)/python -m pytest -m gpu tests/gpu

campaign: $(VENV)/.stamp-engines ## kills, damage and attacks at full size, some hours, into docs/results/campaign.md
	$(BIN)/python campaign/run.py

lint: $(STAMP) ## style, spelling, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell src tests docs examples benchmarks reproduce release README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/lint-imports

type: $(STAMP) ## static types
	$(BIN)/mypy

# The peers need other versions than the tests, so they have an environment of their own.
$(BENCH)/.stamp: pyproject.toml constraints.txt benchmarks/peers.txt
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	@echo "Installing into $(BENCH) (once; a few minutes) ..."
	@$(BENCH)/bin/python $(INSTALL) -c constraints.txt torch
	@$(BENCH)/bin/python $(INSTALL) -c constraints.txt -e '.[dev,bench]'
	@$(BENCH)/bin/python $(INSTALL) --no-deps -r benchmarks/peers.txt
	@touch $@

bench: $(BENCH)/.stamp ## speed against other libraries, into docs/results/performance.md
	$(BENCH)/bin/python benchmarks/run.py

docs: $(STAMP) ## check the examples in the documents
	$(BIN)/python -m pytest tests/docs

$(VENV)/.stamp-docs: $(STAMP)
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev,docs]'
	@touch $@

site: $(VENV)/.stamp-docs ## the documents with the API reference as a site, in site/; dead links fail
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d site/.doctrees docs site
	$(BIN)/python docs/links.py site
	@echo "open site/index.html"

clean: ## remove the environment and caches
	rm -rf $(VENV) $(BENCH) $(LATEST) $(LOWEST) $(SIGN) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
