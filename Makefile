# Every target makes the environment that it needs in .venv first; the second time that is instant.
# Another Python than python3: make test PYTHON=python3.12

# What to add to the tests' command line, for example: make test PYTEST_ARGS="tests/ir -x"
PYTEST_ARGS ?=

BIN := .venv/bin

.PHONY: demo test test-all test-full test-faults check docs bench changelog clean environment-demo environment-dev

environment-demo environment-dev: environment-%:
	@scripts/environment $*

demo: environment-demo
	$(BIN)/penstock train examples/demo.toml
	@echo
	@echo "Next: $(BIN)/penstock doctor runs/demo"
	@echo "For plain penstock in this shell: source $(BIN)/activate"

test: environment-dev
	scripts/test $(PYTEST_ARGS)

# The same tests, and those marked slow (more combinations, more processes, lost ranks) or emulated (the device without hardware).
test-all: environment-dev
	scripts/test --all $(PYTEST_ARGS)

# The same tests with many more generated examples per property, far more combinations in tests/exactness, and other
# examples and other random models at every run. Examples that fail are printed, and kept in .hypothesis/examples.
test-full: environment-dev
	scripts/test --hypothesis-profile=full $(PYTEST_ARGS)

# Loses ranks of 50 runs at random instants, 20 of which have replicas and shards; `make test-all` has 2 such cases, and others that lose a rank. It takes
# about 15 minutes on two cores.
test-faults: environment-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.kills --cases 50

check: environment-dev
	scripts/check

# Ends with a link to the first page.
docs: environment-dev
	scripts/docs

# Ends with one verdict on the budgets of all that it ran, and fails where one is missed. Run it on an idle machine.
bench: environment-dev
	$(BIN)/python bench/budgets.py

# Writes the fragments of changelog.d into CHANGELOG.md as the section of this version, and deletes them.
changelog: environment-dev
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'from penstock.version import VERSION; print(VERSION)')"

# Removes what tools left behind; keeps .venv (slow to build), runs (somebody's results) and examples that failed once.
clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find src tests bench scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
