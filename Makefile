# Everything a developer does here; `make test` is what CI does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
RELEASE = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' django_distlock/__init__.py)
SEED := $(shell date +%Y%m%d)
# Else each process that tests start compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-server test test-with-compose test-stacks test-newest test-oldest coverage all-installed test-fast simulate interleave torture histories model see-red mutants benchmark lint docs messages clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed ## two servers charge a fee: without a lock and with it (SQLite, under a minute)
	$(BIN)/python -m testproject demo

demo-server: $(VENV)/.installed ## serve the demo's pages and its admin
	$(BIN)/python -m testproject serve

test: all-installed ## all that CI does, on every server; installs what is missing
	tools/run-all-tests

test-with-compose: $(VENV)/.installed-dev ## the same without Debian, by Docker: locks on the servers of compose.yaml, then all tests in a container
	tools/test-with-compose

test-stacks: $(VENV)-stacks/.installed ## locks among the packages that Django teams have (agents, admins, tenants), some minutes
	$(VENV)-stacks/bin/python -m tests.stacks $(ONLY)

test-newest: $(VENV)/.installed-dev ## the contract on the servers and the Python of Debian sid, in a folder (an hour)
	tools/test-newest

test-oldest: all-installed ## the contract on the oldest Django and drivers that pyproject.toml allows (an hour)
	tools/test-oldest

coverage: all-installed ## the same, in twice the time, and a list of the lines that no test runs
	tools/run-all-tests --coverage

all-installed:
	tools/install-debian-packages
	$(MAKE) --no-print-directory $(VENV)/.installed-servers

test-fast: $(VENV)/.installed-dev ## no servers, nothing slow, under a minute
	printf '%s\n' 1/3 2/3 3/3 | xargs -P 3 -I PART $(BIN)/python -m pytest -q --part PART -m "not server and not slow"

simulate: $(VENV)/.installed-dev ## run a million schedules of the engine in simulated processes, for hours (SEEDS="--from 5000 --seeds 1000")
	nice -n 19 $(BIN)/python -m tests.simulation $(SEEDS)

interleave: all-installed ## the database backend on real servers, in many orders of its statements, for minutes (ARGUMENTS="--server postgres --seeds 5000")
	$(BIN)/python -m tests.interleavings $(ARGUMENTS)

torture: all-installed ## real servers and processes that fail for some minutes, on every backend (ARGUMENTS="--minutes 60 --backend redis")
	$(BIN)/python -m tests.torture $(ARGUMENTS)

histories: all-installed ## torture every backend, and keep what anybody can check (SEED=7 ARGUMENTS="--minutes 60")
	$(BIN)/python -m tests.torture --seed $(SEED) --history 'histories/$(RELEASE)-$(SEED)/{backend}.jsonl.gz' $(ARGUMENTS)
	tools/check-history histories/$(RELEASE)-$(SEED)/*.jsonl.gz

model: ## search a model of the lease and the fence completely with Spin, in two minutes (ONLY="words of a variation")
	tools/install-debian-packages spin gcc
	$(PYTHON) model/check.py "$(ONLY)" $(if $(FOLDER),--folder "$(FOLDER)")

see-red: $(VENV)/.installed-dev ## take each protection out of a copy, and see its tests fail (ONLY="words of its name")
	$(BIN)/python -m tests.protections $(if $(ONLY),"$(ONLY)")

mutants: $(VENV)/.installed-dev ## change the pure core in small ways, and see its tests fail (ONLY="django_distlock.ground.naming*")
	$(BIN)/mutmut run $(if $(ONLY),"$(ONLY)")
	$(BIN)/mutmut results

benchmark: all-installed ## measure every backend beside raw commands and other libraries (half an hour, on an idle machine)
	$(BIN)/python -m benchmarks --no-disk --save docs/_static/benchmarks

lint: $(VENV)/.installed-dev ## style, types, layers, spelling
	tools/lint

docs: $(VENV)/.installed-dev ## build the documentation into docs/_build
	tools/build-docs

messages: $(VENV)/.installed-dev ## collect the texts to translate, and compile the translations (needs gettext)
	cd django_distlock && ../$(BIN)/python -m django makemessages --all --no-obsolete --no-location --no-wrap
	cd django_distlock && ../$(BIN)/python -m django compilemessages

clean: ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-stacks .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage .coverage.* htmlcov mutants dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --editable '.[demo]'
	touch $@

# Dependency groups need a newer pip than Python 3.11 brings along.
$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'
	$(PIP) install --editable '.[all,demo]' --group dev
	touch $(VENV)/.installed $@

$(VENV)-stacks/.installed: pyproject.toml
	tools/install-debian-packages
	$(PYTHON) -m venv $(VENV)-stacks
	$(VENV)-stacks/bin/python -m pip -qq install --upgrade 'pip>=25.1'
	$(VENV)-stacks/bin/python -m pip -qq install --editable '.[all]' --group stacks
	touch $@

$(VENV)/.installed-servers: $(VENV)/.installed-dev
	$(PIP) install --group servers
	touch $@
