# What a user types. Everything but Python 3.11+ and make is installed into .venv by the first target that needs it.
.POSIX:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
LEGACY := .venv-legacy
XLA := .venv-xla
PORT ?= 8000
TRIALS ?= all
SEED ?= 1
HISTORIES := .cache/campaign
SITE := build/site
# Warnings are errors: a link or an anchor that leads nowhere ends the build.
SITE_BUILD = $(BIN)/sphinx-build -q -b html -c docs --fail-on-warning --keep-going -d .cache/site . $(SITE)

.PHONY: help demo ui test faults campaign test-long test-versions test-legacy test-xla lint bench bench-quick scale cluster cluster-down docs docs-serve dist clean requirements

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || grep '##' Makefile

demo: $(INSTALLED)  ## fine-tune a question-answering model through an Airflow DAG run, on this machine
	@$(BIN)/python -m manycpu.operators.local_airflow demo

ui: $(COMPILED)  ## Airflow's web UI on loopback, with the DAGs ready to trigger
	@$(BIN)/python -m manycpu.operators.local_airflow ui

test: $(COMPILED)  ## everything that guards main, what takes seconds first; ends with what took longest
	@sh tests/system-packages
	@$(BIN)/python -m pytest -n 3 -m "not long" --durations=10 --durations-min=1

faults: $(COMPILED)  ## kill commands, and give them errors, wherever they change something; takes half a day, TRIALS=50 less
	@MANYCPU_FAULTS=$(TRIALS) $(BIN)/python -m pytest -s tests/contract/test_faults.py tests/contract/test_request_faults.py tests/dags/test_task_faults.py tests/contract/test_planted_bugs.py
	@MANYCPU_DRAWN=20 $(BIN)/python -m pytest tests/unit/test_drawn_*.py tests/contract/test_drawn_*.py tests/kubernetes/test_drawn_*.py

campaign: $(COMPILED)  ## random faults on the test cluster, for users at the same time, by seed: SEED=7 TRIALS=60; TRIALS=4-6 replays
	@MANYCPU_SEED=$(SEED) MANYCPU_TRIALS=$(TRIALS:all=60) $(BIN)/python -m pytest tests/long/test_campaign.py -k promised; ended=$$?; \
	  $(BIN)/python tests/support/campaign_judge.py $(HISTORIES)/$(SEED) && exit $$ended

test-long: $(COMPILED)  ## torch's own tests of its backends, Accelerate's, official examples if given, long trainings, an Airflow whose parts are lost; takes an hour
	@$(BIN)/python -m pytest -m long
	@$(BIN)/python -m pytest tests/long

test-versions: $(COMPILED)  ## the tests that depend on Airflow, Python and torch, with versions that are supported; VERSIONS=3.1.8 chooses
	@$(BIN)/python tests/versions.py $(VERSIONS)

test-legacy: $(LEGACY)/.installed  ## two ranks with Intel's extension, in an environment of its own
	@MANYCPU_LEGACY=$(LEGACY) $(BIN)/python -m pytest tests/legacy

test-xla: $(XLA)/.installed  ## one process on eight devices of XLA, in an environment of its own
	@MANYCPU_XLA=$(XLA) $(BIN)/python -m pytest tests/xla

lint: $(INSTALLED)  ## style, types, the dependency rule, words, workflows, and the docs site built strictly
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy
	@$(BIN)/python tests/lint/words.py
	@sh tests/lint/github '$(BIN)/check-jsonschema'
	@$(SITE_BUILD)

bench: $(COMPILED)  ## benchmarks, side by side, as ratios
	@$(BIN)/python -m bench

bench-quick: $(COMPILED)  ## those without a cluster, with few repetitions, in about three minutes; results go to bench/quick
	@$(BIN)/python -m bench --quick

scale: $(COMPILED)  ## what holds with hundreds of pods and a thousand runs, with limits; takes half an hour
	@sh tests/system-packages
	@$(BIN)/python -m bench.scale

cluster: $(COMPILED)  ## a real two-node Kubernetes cluster on this machine; the first start takes minutes
	@sh tests/system-packages
	@cd tests && ../$(BIN)/python -m cluster up

cluster-down: $(INSTALLED)  ## end the cluster, without a trace
	@cd tests && ../$(BIN)/python -m cluster down

docs: $(INSTALLED)  ## write the generated pages (fields, command line, operators, benchmarks, reliability) and build the site
	@$(BIN)/python docs/reference.py
	@$(BIN)/python -m bench._page
	@$(BIN)/python docs/reliability.py
	@$(SITE_BUILD)
	@echo 'site: $(SITE)/index.html; make docs-serve shows it'

docs-serve: docs  ## serve the docs site on 127.0.0.1, port 8000: make docs-serve PORT=9000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

dist: $(INSTALLED)  ## what a release has: wheel, sdist, and of the pinned packages an SBOM and a list of licences
	@! git ls-files --others --exclude-standard dags docker operators pipeline | sed 's/$$/: untracked, and would be packed/' | grep .
	@rm -rf dist
	@$(BIN)/python -m hatchling build -d dist
	@$(BIN)/python requirements/sbom.py lock >dist/manycpu.cdx.json
	@$(BIN)/python requirements/sbom.py licences >dist/licences.txt

clean:  ## remove what these targets made: the environment, Airflow's folder, caches
	rm -rf $(VENV) $(LEGACY) $(XLA) .airflow .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

requirements: $(INSTALLED)  ## resolve the pinned requirements again
	@sh requirements/compile $(BIN)/uv

$(INSTALLED): pyproject.toml requirements/bootstrap.txt requirements/torch.txt requirements/ccl.txt requirements/all.txt
	@sh requirements/install '$(PYTHON)' $(VENV)
	@touch $@

# All the bytecode: where Python may not write any, every process would compile what it imports again.
$(COMPILED): $(INSTALLED)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || :  # templates of packages are no Python
	@touch $@

$(LEGACY)/.installed: $(INSTALLED) requirements/legacy-torch.txt requirements/legacy.txt
	@'$(PYTHON)' -m venv $(LEGACY)
	@VIRTUAL_ENV='$(CURDIR)/$(LEGACY)' $(BIN)/uv pip install --quiet -r requirements/legacy-torch.txt -r requirements/legacy.txt
	@touch $@

$(XLA)/.installed: $(INSTALLED) requirements/xla-torch.txt requirements/xla.txt
	@'$(PYTHON)' -m venv $(XLA)
	@VIRTUAL_ENV='$(CURDIR)/$(XLA)' $(BIN)/uv pip install --quiet -r requirements/xla-torch.txt -r requirements/xla.txt
	@touch $@
