# `make demo` and `make test` set up what they need in .venv, on any machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
# `make test EXTRAS=torch,plan` brings the oracles (torch, transformers) and the TPU compiler: gigabytes, which only
# tests need. Without them the tests that compare with them are skipped.
EXTRAS ?=
TESTS ?= tests
# Three processes keep two cores busy, because many tests wait for processes and disks.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile
# The files with mesh tests, because each process imports all files that it is given. grep ends with 1 if there are none.
MESH_FILES := files=$$(grep -rl --include="*.py" "mark\.mesh" $(TESTS)) || exit $$(($$? - 1));
# The point where the annealed branches leave the constant one: 80% of the demo's horizon.
FORK_TOKENS := 4096000
# The tests start many processes, which would each compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test slow lint docs clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[eval,gcs,hub,slurm,test,lint]'
	touch $@

demo: setup
	$(BIN)/pma train --config demo --workdir runs/demo
	$(BIN)/pma fork runs/demo --at-tokens $(FORK_TOKENS) --workdir runs/demo-annealed \
		--config.schedule.decay=cosine --config.schedule.decay_start_tokens=$(FORK_TOKENS)
	$(BIN)/pma fork runs/demo --at-tokens $(FORK_TOKENS) --workdir runs/demo-annealed-linear \
		--config.schedule.decay=linear --config.schedule.decay_start_tokens=$(FORK_TOKENS)
	$(BIN)/pma sweep runs/demo --recipes sma,ema:alpha=0.1,ema:alpha=0.2,wma --windows 3,6,10,15
	$(BIN)/pma sweep runs/demo --kind block_mean --recipes sma,wma,lagfree:lag=0.5,lagfree --windows 6,10,15,20,25
	test -d runs/demo/merged/sma-15 || $(BIN)/pma merge runs/demo --last 15 --out runs/demo/merged/sma-15
	$(BIN)/pma evaluate runs/demo runs/demo/merged/sma-15 runs/demo-annealed runs/demo-annealed-linear \
		--tasks pma:last_line,pma:docstring,pma:brackets
	$(BIN)/pma report runs/demo runs/demo-annealed runs/demo-annealed-linear

test: setup
	$(if $(EXTRAS),$(INSTALL) '.[$(EXTRAS)]')
	PMA_TEST_DEVICES=1 $(PYTEST) -m "not mesh" $(TESTS) || [ $$? -eq 5 ]
	$(MESH_FILES) PMA_TEST_DEVICES=8 $(PYTEST) -m mesh $$files || [ $$? -eq 5 ]

# The tests marked slow. Those marked long are run by hand: .venv/bin/python -m pytest -n 2 --slow -m long
slow: setup
	PMA_TEST_DEVICES=1 $(PYTEST) --slow -m "slow and not long and not mesh" $(TESTS) || [ $$? -eq 5 ]
	$(MESH_FILES) PMA_TEST_DEVICES=8 $(PYTEST) --slow -m "slow and not long and mesh" $$files || [ $$? -eq 5 ]

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

docs: setup
	$(INSTALL) '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf .venv runs docs/_build docs/generated
