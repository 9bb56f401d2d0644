# Every target builds its own environment in .venv; the stamp file makes the second call instant.

PYTHON ?= python3
# What to add to the tests' command line, for example: make test PYTEST_ARGS="tests/ir -x"
PYTEST_ARGS ?=

BIN := .venv/bin

.PHONY: demo test test-full test-faults check docs bench changelog clean

demo: .venv/.demo
	$(BIN)/penstock train examples/demo.toml
	@echo
	@echo "Next: $(BIN)/penstock doctor runs/demo"
	@echo "For plain penstock in this shell: source $(BIN)/activate"

test: .venv/.stamp
	scripts/test $(PYTEST_ARGS)

# The same tests with many more generated examples per property, far more combinations in tests/exactness, and other
# examples and other random models at every run. Examples that fail are printed, and kept in .hypothesis/examples.
test-full: .venv/.stamp
	scripts/test --hypothesis-profile=full $(PYTEST_ARGS)

# Loses ranks of 50 runs at random instants, 20 of which have replicas and shards; `make test` has 2 such cases, and others that lose a rank. It takes
# about 15 minutes on two cores.
test-faults: .venv/.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kills --cases 50

check: .venv/.stamp
	scripts/check

# Ends with a link to the first page.
docs: .venv/.stamp
	scripts/docs

bench: .venv/.stamp
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/planning.py
	$(BIN)/python bench/simulate.py

# Writes the fragments of changelog.d into CHANGELOG.md as the section of this version, and deletes them.
changelog: .venv/.stamp
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'from penstock.version import VERSION; print(VERSION)')"

# `install EXTRA`. A .venv that is already there is kept and completed, unless its interpreter no longer runs. The
# distribution was called penstock once: left in place, it would own the command of the same name too.
define install
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip uninstall -qq --yes penstock
	rm -rf src/penstock.egg-info
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(1)]"
	touch $(2)
endef

# What the tests need has all that the demo needs.
.venv/.stamp: pyproject.toml constraints.txt
	$(call install,dev,.venv/.demo $@)

.venv/.demo: pyproject.toml constraints.txt
	$(call install,demo,$@)

# Removes what tools left behind; keeps .venv (slow to build), runs (somebody's results) and examples that failed once.
clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find src tests bench scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
