"""``python -m tests.simulation``: plays histories of the protocol, tells one of them, or finds the mutants."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial

from tests.simulation import product
from tests.simulation.history import Result, drawn, play, shrunk
from tests.simulation.lines import Lines
from tests.simulation.mutants import MUTANTS, found_after

#: Histories that a process plays at a time, and after how many the number so far is shown.
CHUNK, TOLD = 50, 5000
#: The modules of the protocol, without the implementations of what is a model here.
PROTOCOL = (
    *(
        f"supervisor/{name}.py"
        for name in ("attempt", "controller", "decide", "history", "lease", "attempt_progress", "retry_limits")
    ),
    *(f"supervisor/{name}.py" for name in ("lease", "main", "recovery", "retry_limits", "user_requests", "verdict")),
    *("slurm/commands.py", "slurm/configuration.py", "slurm/queue.py", "slurm/run_states.py"),
    *("runs/waiting.py", "runs/request_client.py"),
    *("runs/sweep_submission.py", "supervisor/script_checkpoints.py"),
    *("failures/node_memory.py", "failures/placement.py", "failures/exclusion.py"),
)


def main() -> int:
    """The command line; 1 if an invariant was violated, or a mutant not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--minutes", type=float, default=1e6, help="no more histories begin after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--tell", action="store_true", help="the story of the first history")
    parser.add_argument("--shrink", action="store_true", help="with the fewest faults that violate the same invariant")
    parser.add_argument("--mutants", action="store_true", help="how many histories find each mutant, at most so many")
    parser.add_argument("--lines", action="store_true", help="which lines of the protocol's modules are executed")
    arguments = parser.parse_args()
    if arguments.lines:
        return _count_lines(arguments.seed, arguments.histories)
    if arguments.tell:
        return _tell(arguments.seed, arguments.shrink)
    if arguments.mutants:
        return _find_mutants(arguments.seed, arguments.histories)
    return _play(arguments.seed, arguments.histories, arguments.processes, arguments.minutes * 60)


def _tell(seed: int, shrink: bool) -> int:
    with product.installed():
        plan = shrunk(drawn(seed)) if shrink else drawn(seed)
        result = play(plan, traced=True)
    print(f"seed {seed}: {plan.settings}, {plan.script}")
    print(
        f"  {plan.job_nodes} nodes of {plan.per_node} ranks, time limit {plan.time_limit_s} s, "
        f"{plan.resubmitters} of `wait --resubmit`"
    )
    print("\n".join(result.story))
    print(f"{result.ended}; {result.events} events; {'; '.join(result.violations) or 'no violation'}")
    return bool(result.violations)


def _count_lines(first: int, count: int) -> int:
    lines = Lines(PROTOCOL)
    with product.installed(), lines.recorded():
        for seed in range(first, first + count):
            play(seed)
    print("\n".join(lines.report()))
    return 0


#: What is in effect in a process of the pool, to its end.
_installed = ExitStack()


def _install() -> None:
    _installed.enter_context(product.installed())


def _chunk(seeds: Iterable[int], until: float) -> list[Result]:
    return [play(seed) for seed in seeds if time.monotonic() < until]


def _play(first: int, most: int, processes: int, limit_s: float) -> int:
    began = time.monotonic()
    events: list[int] = []
    faults: list[int] = []
    ends: Counter[str] = Counter()
    violations: list[tuple[int, str]] = []
    kinds: Counter[str] = Counter()
    chunks = [range(at, min(at + CHUNK, first + most)) for at in range(first, first + most, CHUNK)]
    with ProcessPoolExecutor(processes, initializer=_install) as pool:
        for results in pool.map(partial(_chunk, until=began + limit_s), chunks):
            for result in results:
                events.append(result.events)
                faults.append(len(result.plan.faults))
                ends[result.ended] += 1
                kinds.update(fault.kind for fault in result.plan.faults)
                for violation in result.violations:
                    violations.append((result.plan.seed, violation))
                    print(f"seed {result.plan.seed}: {violation}", flush=True)
            if results and len(events) % TOLD < CHUNK:
                print(f"{len(events):,} histories, {len(violations)} violations", file=sys.stderr, flush=True)
    took, count = time.monotonic() - began, len(events)
    spread = ", ".join(f"{number}: {times:,}" for number, times in sorted(Counter(faults).items()))
    print(f"faults per history: {spread}; {', '.join(f'{kind} {number:,}' for kind, number in kinds.most_common())}")
    print(
        f"{count:,} histories from seed {first} in {took:.0f} s ({count / took:.0f}/s in {processes} processes): "
        f"{len(violations)} violations; median {statistics.median(events):.0f} events, {statistics.median(faults):.0f} "
        f"faults; {', '.join(f'{word} {number:,}' for word, number in ends.most_common())}"
    )
    return bool(violations)


def _find_mutants(first: int, most: int) -> int:
    missed = 0
    for name in MUTANTS:
        found = found_after(name, first, most)
        missed += found is None
        print(
            f"{name}: {f'not found in {most:,}' if found is None else f'{found[0]:,} histories: {found[1]}'}",
            flush=True,
        )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
