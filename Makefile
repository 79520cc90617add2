# Every line also works by hand. `make demo` and `make test` need Python 3.11, 3.12 or 3.13 and nothing else.
#
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"    another build of torch
#   make demo PYTHON=python3.12                                                           another Python

PYTHON ?= python3
VENV ?= .venv
# torch comes first and pinned: what is installed afterwards finds it there and fetches no other build.
TORCH ?= torch==2.13.0
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
# Tests start processes of their own: one thread each keeps them from fighting over the cores, bytecode is kept.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest
# Workers take whole files, the longest first (tests/conftest.py); one more than cores, as many tests wait for something.
WORKERS ?= $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test quick durations one check format cluster bench nightly docs docs-serve

demo: $(VENV)/.base
	$(VENV)/bin/terakoya demo

# With CI=true, as continuous integration runs it, also what imitates other machines, and the tests of the tools.
test: $(VENV)/.dev
	$(PYTEST) $(PARALLEL)

# The inner loop: all but the tests that are slow by tests/durations.json.
quick: $(VENV)/.dev
	$(PYTEST) -n logical --dist loadfile --no-loadscope-reorder -q -m "not nightly and not slow"

# After tests have become longer or shorter: tests/durations.json, by which workers take the longest files first and
# `make quick` leaves slow tests out.
durations: $(VENV)/.dev
	CI=true $(PYTEST) $(PARALLEL) --write-durations

# make one T=tests/core/rows/test_packing.py
one: $(VENV)/.dev
	$(PYTEST) -q $(T)

check: $(VENV)/.dev
	tools/check $(VENV)/bin

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

# The documentation as a site, in build/site; a broken link fails. docs-serve shows it at http://127.0.0.1:8000 and
# follows changes.
docs: $(VENV)/.docs
	mkdir -p build/docs
	$(VENV)/bin/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs
	mkdir -p build/docs
	$(VENV)/bin/python -m mkdocs serve

# Several hosts on one machine (network namespaces; root), two processes under every engine, a two-node Slurm where its
# packages are: apt install slurm-wlm munge openssh-server.
cluster: $(VENV)/.dev
	$(PYTEST) tests/tools/test_cluster.py tests/tools/test_engine_table.py tests/tools/test_slurm.py

# What is too slow for every change: many kills, full tables, the demo from nothing, properties on many examples. Large
# tables take three nights; make nightly NIGHTS=1 tries everything.
NIGHTS ?= 3
nightly: $(VENV)/.dev
	CI=true $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "nightly or hypothesis" --hypothesis-profile night \
	  --nights $(NIGHTS) --timeout=7200

# The comparisons whose figures the README gives; each also runs alone, --help says what it takes.
bench: $(VENV)/.dev
	@test -n "$(CORPUS)" && test -n "$(TOKENIZER)" || \
	  { echo "make bench CORPUS=text.jsonl.gz TOKENIZER=folder   (a folder that terakoya tokenizer train made)"; exit 2; }
	$(VENV)/bin/python tools/bench/encode.py $(CORPUS) --tokenizer $(TOKENIZER)
	$(VENV)/bin/python tools/bench/prepare_mecab.py $(CORPUS) --tokenizer $(TOKENIZER)
	$(VENV)/bin/python tools/bench/count.py $(CORPUS) --tokenizer $(TOKENIZER)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/bench/masking.py --corpus $(CORPUS) --tokenizer $(TOKENIZER)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/bench/training.py --corpus $(CORPUS) --tokenizer $(TOKENIZER)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/bench/electra.py --corpus $(CORPUS) --tokenizer $(TOKENIZER)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/bench/loop.py
	$(VENV)/bin/python tools/bench/help.py
	$(VENV)/bin/python tools/bench/vocabulary.py $(CORPUS)

# Stamps: made when an installation has succeeded, so that a second run installs nothing.
$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else \
	  "%s is Python %d.%d; terakoya needs 3.11, 3.12 or 3.13: make PYTHON=python3.11 ..." % (sys.executable, *v[:2]))'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -e ".[dev,deepspeed]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install -e ".[docs]"
	touch $@
