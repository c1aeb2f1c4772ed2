# verl: `make quickstart` and `make test` do all the set-up. Needs GNU make and Python 3.11 or newer; no GPU, no model hub.
VENV  ?= .venv
ARGS  ?=
MODEL ?= models/SmolLM2-135M-Instruct
READY  = $(VENV)/.ready
# tests that start many processes, each of which imports torch: minutes, so they have a command of their own
MANY   = tests/engine/test_fsdp.py tests/trainer/test_pipeline.py tests/trainer/test_pipeline_resume.py
# helpers: a make variable becomes the script's environment
export PYTHON TORCH_INDEX

.PHONY: help quickstart test test-processes lint clean
help:
	@echo "make quickstart   train SmolLM2-135M to add with GRPO (first time: set-up 3 min, then under 3 min of training)"
	@echo "make test         run the core tests                  make lint   check the style"
	@echo "make test-processes   those that train over several processes or kill them"
	@echo "make clean        remove $(VENV), the quick start's model and its run"
	@echo "Settings: PYTHON=python3.12  VENV=.venv  TORCH_INDEX=URL  ARGS='trainer.seed=1' (quickstart) or '-k grpo' (test)"

$(READY): constraints/core.txt pyproject.toml scripts/venv.sh
	@rm -f $@
	@bash scripts/venv.sh $(VENV) constraints/core.txt -e '.[test,quickstart]'
	@touch $@

quickstart: $(READY)
	@$(VENV)/bin/python examples/quickstart/prepare.py --model $(MODEL)
	@$(VENV)/bin/verl train examples/quickstart/config.yaml $(ARGS)

test: $(READY)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest $(MANY:%=--ignore=%) $(ARGS)

test-processes: $(READY)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest $(MANY) $(ARGS)

lint: $(READY)
	@$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) models/SmolLM2-135M-Instruct runs/quickstart
