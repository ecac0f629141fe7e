# `make demo` and `make test` do all their own set-up on a machine with Python 3.11+ and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test lint typecheck unit test-slow accuracy methods speed bench clean

KERNEL := hatch_build.py $(wildcard src/tukeyreg/kernel/*.[ch])

$(VENV)/.installed: pyproject.toml $(KERNEL)
	@$(PYTHON) -c 'import sys; sys.exit("tukeyreg needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m tukeyreg.demo --out demo

test: lint typecheck unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not slow'

# Statistical checks that take minutes; not part of `make test`.
test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow

# The accuracy and refusal numbers of docs/accuracy.md; DATA is a folder with the raw files.
accuracy: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py --data $(DATA)

# Every method on every table, rows needed, and speed; the numbers of docs/accuracy.md.
methods: $(VENV)/.installed
	$(BIN)/python benchmarks/methods.py --data $(DATA)

# Speed, printed as ratios against peers in the same process.
speed: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py --data $(DATA) --only speed
	$(BIN)/python benchmarks/methods.py --only speed

# Time and memory of every engine against peers; the tables of benchmarks/README.md.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/engines.py

clean:
	rm -rf $(VENV) src/tukeyreg/kernel/kernel.so demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
