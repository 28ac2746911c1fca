# make demo   set everything up in .venv and watch a run being preempted and resumed, on this machine
# make test   set everything up, a real Slurm included (as root on Debian or Ubuntu), and run the tests;
#             TESTS="..." are pytest's arguments; make test-fast: unit tests and the main ones with ranks, without Slurm
# make lint   ruff and mypy
# make test-versions the matrix of docs/measurements/versions.md: four pairs of Python and torch, three Slurms;
#                    most of an hour, 3 GB;
#                    PYTHONS="python3.10 /opt/python3.13/bin/python3.13 ..."  ROWS="python3.10-torch2.4.1 slurm-sid ..."
# make gpu-surface   which of the names of torch's CUDA builds that clusterddp uses are in torch 2.4 to the newest:
#                    tests/versions/GPU_SURFACE.md; downloads 4 GB, and needs 3 GB of disk
# make test-gpu-faults what the tests on stand-in devices find of the faults put into the code for GPUs; 10 minutes
# make real-nccl     torch's own NCCL process group over stand-in CUDA and NCCL libraries: flight record, timeout,
#                    suspension in torch 2.4 to the newest; RELEASES="2.4.1 newest" some of them
# make pictures      docs/images: a recorded run, and the report on one in Chromium
# make docs          the documentation as a site with search, in build/docs/site; a dead link is an error
# make reference     docs/reference, from the docstrings, signatures and options in the code
# make completion    completions/ for bash and zsh, from the options in the code
# make dist   wheel and sdist in dist/, and a preempted run from the wheel in a clean environment; make dist-offline: the
#             same, installed without a network from a folder of wheels (as root)
# make coverage   `make test` with its lines counted, those of ranks and jobs too; build/coverage/html (COVERAGE=... some tests)
# make gpu-check     what needs a GPU, in calls of nine minutes; again: the cases that are
#                    left; GPU_CHECK=options; make gpu-check-stand-in: all of it at small sizes on pretend devices
# make test-24.11    the tests that need a Slurm, on Debian 13's 24.11; make test-product, every combination,
#                    and slow tests whose main point other tests cover
# make test-browser  the page of `clusterddp report` in Chromium (as root on Debian or Ubuntu, it is installed), with axe,
#                    and what users look for, by the site's own search in node; SCREENSHOTS=FOLDER keeps pictures
# make chaos    what user code does to its own process (forks, signal handlers, exits), preempted and killed at random;
#               CHAOS="-k fork-then-sys-exit --seed 1" are pytest's arguments
# make simulate      histories of the protocol in a simulated world, by its own code: SIMULATE="--histories 100000 --seed 7",
#                    "--tell --shrink --seed 7" the story of one, "--mutants" whether mistakes in the product are found
# make rehearsals    clusterddp rehearse on 24 scripts with a known bug each, and on the same scripts without it (1 hour);
#                    REHEARSALS="--quick optimizer" are its arguments
# make soak     about 300 preemptions and other faults at random moments, in 50 runs; CLUSTERDDP_SOAK_RUNS=1: in two;
#               SOAK="--seed 7 -k cgroup-003" are pytest's arguments
# make soak-booking  whether each second of a run interrupted 23 times is booked to what it was doing (11 minutes)
# make bench  our figures, each beside its limit, in one table: benchmarks/results/bench.md; at most 15 minutes;
#             BENCH="saves handover" runs these in full: steady-state steady-state-ddp saves restore startup handover
#             scale spares (12 minutes, 5 nodes) peers (hours: the same training under the same faults, by other tools)
# make bench-compare REV=main  what is slower by 10% or more than at that commit; REV="v1 v2" compares two commits
# make cluster  a shell as an ordinary user on a real Slurm of 2 nodes, which ends with the shell
#
# TORCH_INDEX=URL   another package index for torch, such as PyTorch's own CPU builds (PyPI's include CUDA)
# PYTHON=python3.12 another interpreter

# Slurm jobs of the tests run as an ordinary user, who cannot run an interpreter below /root.
PYTHON ?= $(shell if [ "$$(id -u)" = 0 ] && /usr/bin/python3 -c 'import sys; assert sys.version_info >= (3, 10)' 2>/dev/null; \
                  then echo /usr/bin/python3; else echo python3; fi)
TORCH_INDEX ?=
PIP = .venv/bin/python -m pip --disable-pip-version-check -q
INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
DEMO_RUN = .clusterddp-demo

.PHONY: demo test test-fast test-versions gpu-surface real-nccl test-gpu-faults gpu-check test-24.11 test-product test-browser chaos rehearsals simulate soak soak-booking bench lint pictures reference completion docs dist dist-offline coverage cluster slurm clean

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing python3-venv" && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; }
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt $(INDEX) -e '.[dev]'
	@touch $@

# What the tests of the integrations and the trackers need in addition.
.venv/integrations: .venv/ready
	$(PIP) install -c constraints.txt $(INDEX) -e '.[dev,integrations,hydra,trackers]'
	@touch $@

demo: .venv/ready
	@rm -rf $(DEMO_RUN)
	CLUSTERDDP_PREEMPT=[120] .venv/bin/clusterddp submit jobs/digits.yaml --local --device cpu --nodes 2 --gpus 2 --run-dir $(DEMO_RUN)
	@cat $(DEMO_RUN)/outcome.json

test: .venv/integrations slurm
	.venv/bin/python -m tests $(TESTS)

CORE = agreement context deadline early_end external_loader first_failure gradients own_process rank_exit saving signals
FAST = .venv/bin/python -m pytest -q -m 'not slurm' --before tests/costs.jsonl tests/unit $(CORE:%=tests/ranks/test_%.py) $(TESTS)
test-fast: .venv/ready
	@queue=$$(mktemp -d); $(FAST) --queue $$queue & other=$$!; $(FAST) --queue $$queue; code=$$?; \
	wait $$other && rm -r $$queue && exit $$code

test-versions: .venv/ready slurm
	.venv/bin/python -m tests.versions $(if $(PYTHONS),--pythons "$(PYTHONS)") $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) $(ROWS)

gpu-surface: .venv/ready
	.venv/bin/python -m tests.versions.gpu_surface $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

test-gpu-faults: .venv/ready
	.venv/bin/python -m tests.gpu.planted

real-nccl: .venv/ready
	.venv/bin/python -m tests.versions.real_nccl $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) $(RELEASES)

gpu-check: .venv/ready
	.venv/bin/python -m benchmarks.gpu_check --out benchmarks/results/gpu-check.json $(GPU_CHECK)

# Public repositories whose checkouts are in the folder REPOSITORIES; REPOSITORIES_PYTHON has the packages they need.
.PHONY: test-repositories
test-repositories: .venv/ready
	@[ -d "$(REPOSITORIES)" ] || { echo 'make test-repositories REPOSITORIES=/folder/of/checkouts [NAMES="nanogpt timm"]'; exit 2; }
	.venv/bin/python -m tests.repositories $(REPOSITORIES) $(NAMES) $(if $(REPOSITORIES_PYTHON),--python $(REPOSITORIES_PYTHON))

# A certificate of each repository that has none in tests/repositories/certificates, and of those in NAMES.
.PHONY: rehearse-repositories
rehearse-repositories: .venv/ready
	@[ -d "$(REPOSITORIES)" ] || { echo 'make rehearse-repositories REPOSITORIES=/folder/of/checkouts [NAMES="nanogpt timm"]'; exit 2; }
	.venv/bin/python -m tests.repositories.rehearsals $(REPOSITORIES) $(NAMES) $(if $(REPOSITORIES_PYTHON),--python $(REPOSITORIES_PYTHON))

.PHONY: gpu-check-stand-in
gpu-check-stand-in: .venv/ready
	.venv/bin/python -m benchmarks.gpu_check --stand-in --budget 1200 $(GPU_CHECK)

test-24.11: .venv/ready slurm
	.venv/bin/python -m tests.cluster install --release trixie
	CLUSTERDDP_TEST_RELEASE=trixie .venv/bin/python -m pytest tests/slurm/test_main_job.py tests/slurm/test_preemption.py \
		tests/slurm/test_fencing.py tests/cluster/test_cluster.py tests/slurm/test_faults.py tests/slurm/test_hangs.py

# The files with a test that is marked for it, or with more cases where the variable is set.
test-product: .venv/integrations slurm
	CLUSTERDDP_TEST_PRODUCT=1 .venv/bin/python -m pytest \
		$$(grep -rlE 'mark\.product|CLUSTERDDP_TEST_PRODUCT' tests --include='test_*.py' | grep -v ^tests/browser/)
	.venv/bin/python -m tests.cluster install --release sid
	CLUSTERDDP_TEST_PRODUCT=1 CLUSTERDDP_TEST_RELEASE=sid .venv/bin/python -m pytest tests/slurm/test_hostile_site.py

.venv/browser: .venv/ready .venv/docs
	$(PIP) install -c constraints.txt $(INDEX) -e '.[browser]'
	@{ command -v node && command -v chromium || command -v google-chrome; } >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium nodejs >/dev/null; }
	@touch $@

test-browser: .venv/browser
	CLUSTERDDP_TEST_PRODUCT=1 .venv/bin/python -m pytest -q tests/browser $(TESTS)

rehearsals: .venv/ready
	.venv/bin/python -m tests.rehearsal.rehearsals $(REHEARSALS)

chaos: .venv/ready slurm
	.venv/bin/python -m pytest -m chaos tests/chaos $(CHAOS)

simulate: .venv/ready
	.venv/bin/python -m tests.simulation $(SIMULATE)

soak: .venv/ready slurm
	.venv/bin/python -m pytest -m soak tests/soak/test_soak.py $(SOAK)

soak-booking: .venv/ready slurm
	.venv/bin/python -m pytest -m soak tests/soak/test_booking.py $(SOAK)

# Without a Slurm, which only root can install, the rows that need one tell so.
bench: $(if $(BENCH),.venv/bench .venv/integrations,.venv/ready)
	-@$(MAKE) --no-print-directory slurm
	.venv/bin/python -m benchmarks $(BENCH)

.PHONY: bench-compare
bench-compare: .venv/ready
	@[ -n "$(REV)" ] || { echo 'make bench-compare REV=COMMIT [REV="COMMIT COMMIT"]'; exit 2; }
	.venv/bin/python -m benchmarks.compare $(REV) $(BENCH)

.venv/bench: .venv/ready
	$(PIP) install -c constraints.txt $(INDEX) -e '.[bench]'
	@touch $@

slurm: .venv/ready
	.venv/bin/python -m tests.cluster install

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

pictures: .venv/browser
	.venv/bin/python -m docs.images.recording
	.venv/bin/python -m docs.images.make

reference: .venv/ready
	.venv/bin/python -m docs.reference.generate

.venv/docs: .venv/ready
	$(PIP) install -c constraints.txt $(INDEX) -e '.[docs]'
	@touch $@

docs: .venv/docs
	.venv/bin/python -m docs.site

completion: .venv/ready
	.venv/bin/python -m docs.reference.completion

# The wheel is built from the sdist, so that both are tested.
dist: .venv/ready
	rm -rf dist build/dist-tools
	$(PYTHON) -m venv build/dist-tools
	build/dist-tools/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt build
	build/dist-tools/bin/python -m build --outdir dist . >build/dist-tools/log || { cat build/dist-tools/log; exit 1; }
	.venv/bin/python -m tests.dist dist

dist-offline: dist
	$(PIP) download -c constraints.txt $(INDEX) -d build/wheels dist/*.whl
	unshare --net sh -c 'ip link set lo up && exec "$$@"' sh .venv/bin/python -m tests.dist dist build/wheels

.venv/coverage: .venv/ready
	$(PIP) install -c constraints.txt coverage
	@touch $@

coverage: .venv/coverage .venv/integrations slurm
	rm -rf build/coverage && mkdir -p build && mkdir -m 1777 build/coverage  # the test cluster's jobs have another user
	.venv/bin/python -m coverage run -m tests $(COVERAGE); tests=$$?; \
	.venv/bin/python -m coverage combine -q && .venv/bin/python -m coverage html -q -d build/coverage/html && \
	.venv/bin/python -m coverage report && exit $$tests  # the report comes after a failed test, too

cluster: .venv/ready slurm
	.venv/bin/python -m tests.cluster run bash

clean:
	rm -rf .venv $(DEMO_RUN) build dist *.egg-info
