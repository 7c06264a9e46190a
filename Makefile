PYTHON ?= python

.PHONY: style lint test test-gpu bench bench-gpu sanitize structure readme

style:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	lint-imports

test:
	$(PYTHON) -m pytest -n 2

test-gpu:
	$(PYTHON) -m pytest -m gpu

bench:
	$(PYTHON) -m benchmarks.acceptance --per-kind 10 --max-new-tokens 96 --compared 2 --timed 4 \
		--timed-lengths 2 4 6 8 12 16 --output benchmarks/results/acceptance_cpu.json

bench-gpu:
	$(PYTHON) -m benchmarks.h200 --output benchmarks/results $(if $(PEERS),--peers $(PEERS))

sanitize:
	$(PYTHON) -m benchmarks.sanitize --tool memcheck --output benchmarks/results/memcheck_h200.json
	$(PYTHON) -m benchmarks.sanitize --tool racecheck --output benchmarks/results/racecheck_h200.json

structure:
	$(PYTHON) docs/structure.py

readme:
	$(PYTHON) -m benchmarks.readme
