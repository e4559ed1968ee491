# The commands of this repository. Each sets up .venv first if need be.

export EXTRAS ARCH # as variables of the environment: no part of a command line

.PHONY: help setup quickstart test lint sanitize kernels clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:           ## create .venv with the tested versions; EXTRAS=te adds Transformer Engine
	@bash scripts/setup.sh

quickstart:      ## train a small DeepSeek-V3-shaped model with mok and with alltoall, compare, draw
	@bash scripts/quickstart.sh

test:            ## ruff, mypy, pytest; ARGS='tests/build -k cache' for a part
	@bash scripts/test.sh $(ARGS)

lint:            ## ruff and mypy alone
	@bash scripts/lint.sh

sanitize:        ## compute-sanitizer over small launches; needs a GPU; ARGS='--tools memcheck'
	@bash scripts/setup.sh
	@.venv/bin/python -m tests.megakernel.sanitize $(ARGS)

kernels:         ## compile the kernels ahead of time; ARCH=90a,100a,103a
	@bash scripts/setup.sh
	@.venv/bin/mok-megatron build --arch "$${ARCH:-90a}"

clean:           ## remove caches and build products; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
