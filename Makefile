# make demo   train on two ranks, then let a training hang and print why
# make test   lint, types, and the whole test suite; TESTS="tests/rules -k breakpoint" runs a part of it
# make matrix the suite on the oldest, today's and the newest versions; SESSION=oldest runs one (see noxfile.py)
# make docs   the site, into build/site; fails at any warning, broken link or cause without a page
# make soak   train for MINUTES with everything on, and see whether anything grows
# make faults let small trainings go wrong in every known way, and print how often the cause is named
# make restarts let a training go wrong at random instants, start it again, and compare the results (an hour)
# make clients let published projects train with stock Lightning and with this package, and compare (an hour, 8 GB of disk)
# make upstream run Lightning's own tests with its classes and with ours in their place (an hour and a half)
# make package wheel and sdist, checked, installed into an empty environment, and tried there
# make pictures the pictures of the documentation, from a real hang and a real straggler; needs Chromium
# make gpu    with NCCL, several ranks on one GPU: the tests that need it, recordings, what the guard costs
#
# All set up .venv first, and again whenever pyproject.toml changes.

PYTHON ?= python3
# Pinned, so that what is tested is what was developed against. Installed only where .venv has no torch yet.
# Another build, one for CPUs only for instance: make demo TORCH="torch --index-url ..."
TORCH ?= torch==2.13.0

HANGS := rank0_evaluation unseeded_split slow_log_storage loader_stall late_rank0 loader_memory
HANG ?= rank0_evaluation
STRATEGY ?= safe
REPEAT ?= 1
TESTS ?=
SESSION ?=
MINUTES ?= 60

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCUMENTED := $(VENV)/.documented

.PHONY: demo hangs test suite lint docs matrix bench soak faults restarts clients upstream gpu package pictures install clean

demo: $(INSTALLED)
	rm -rf runs/demo
	$(BIN)/python examples/digits.py --root-dir runs/demo/digits
	$(BIN)/python examples/hangs/$(HANG).py --root-dir runs/demo/hang || echo "Exit code $$?: the hang was ended."
	ls runs/demo/hang/ncclsafe/*/report.*

# All six, each as often as REPEAT says; STRATEGY=ddp shows what Lightning alone prints.
hangs: $(INSTALLED)
	@for hang in $(HANGS); do for run in $$(seq $(REPEAT)); do \
		echo "--- $$hang, run $$run"; \
		$(BIN)/python examples/hangs/$$hang.py --strategy $(STRATEGY) --root-dir runs/hangs/$$hang/$$run || true; \
	done; done

# Both at the same time: while the suite collects its tests, it needs only one core.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(INSTALLED)
	$(BIN)/python tests/suite.py $(TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python docs/site/links.py
	$(BIN)/python docs/site/search.py build/site

# A missing interpreter is reported, and fails only a SESSION that was named.
matrix: $(INSTALLED)
	@status=0; mkdir -p runs/matrix; rm -f runs/matrix/*.json; \
	$(BIN)/nox --report runs/matrix/report.json $(if $(SESSION),--error-on-missing-interpreters --session $(SESSION)) \
		-- $(TESTS) || status=1; \
	$(BIN)/python noxfile.py; \
	exit $$status

bench: $(INSTALLED)
	$(BIN)/python tests/programs/benchmarks/step_overhead.py

# SOAK takes options: make soak MINUTES=15 SOAK="--with stock --json samples.json"
soak: $(INSTALLED)
	$(BIN)/python tests/programs/benchmarks/soak.py --minutes $(MINUTES) $(SOAK)

# FAULTS takes options: make faults FAULTS="--only data-stall --json scores.json --strategy SafeModelParallel"
faults: $(INSTALLED)
	$(BIN)/python tests/programs/faults/scoreboard.py $(FAULTS)

# RESTARTS takes options: make restarts RESTARTS="--faults 10 --only killed raised --json runs/restarts.json"
restarts: $(INSTALLED)
	$(BIN)/python tests/programs/restarts/campaign.py $(RESTARTS)

# CLIENTS takes options: make clients CLIENTS="--only darts chemprop --variants plain spawn --turns 10 --json told.json"
clients: $(INSTALLED)
	$(BIN)/python tests/programs/clients/run.py $(CLIENTS)

# UPSTREAM takes options: make upstream UPSTREAM="--only strategies trainer/test_trainer.py --checkout ../pytorch-lightning"
upstream: $(INSTALLED)
	$(BIN)/python -m pytest --quiet tests/programs/upstream/check_in_place.py
	$(BIN)/python tests/programs/upstream/compare.py $(UPSTREAM)

# See tests/programs/gpu/README.md. Without a GPU the tests are skipped, and nothing is recorded or measured.
gpu: $(INSTALLED)
	@status=0; \
	$(BIN)/python tests/programs/gpu/record.py || status=1; \
	$(BIN)/python -m pytest tests/programs/gpu || status=1; \
	$(BIN)/python tests/programs/gpu/overhead.py || status=1; \
	exit $$status

# Into dist/. As in the release workflow: nothing of this checkout's environment is used.
package:
	$(PYTHON) tests/programs/package.py --torch "$(TORCH)"

pictures: $(INSTALLED)
	$(BIN)/python tests/programs/pictures.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2> /dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(DOCUMENTED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf runs build dist .nox .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
