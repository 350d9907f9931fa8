# Two commands: `make run` trains the pocket track to its target, `make test` checks everything (`make browser` first
# installs Debian's Chromium, in which the report is tested).
#
#   make run ARGS="--seed 1"        extra flags for `speedrun train`
#   make run TORCH_INDEX=<url>      where pip takes torch from, to choose a CPU or a CUDA build
#   make run PYTHON=python3.12      another interpreter (3.11 or newer)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: run test browser clean

run: $(VENV)/.ready
	@$(BIN)/speedrun data prepare
	@$(BIN)/speedrun train $(ARGS)

test: $(VENV)/.ready-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# The report is tested in a real browser; without one those tests are skipped.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  { echo "no browser: install Chromium or Chrome by hand (apt-get needs root), or go on without those tests"; exit 2; }

# torch first and pinned: asked for by range, pip would take the newest build with gigabytes of CUDA libraries.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "speedrun needs Python 3.11 or newer; $$($(PYTHON) --version) is too old. Try: make PYTHON=python3.12"; exit 2; }
	@echo "setting up $(VENV) (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
