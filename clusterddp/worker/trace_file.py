"""The process that stores a rank's profile while training continues: the trace, compressed, and a table of operators.

``python -m clusterddp.worker.trace_file TARGET``: the trace comes on standard input, as the Chrome JSON that torch's
profiler exports, and is read once, in blocks. No torch: its own summary of a trace takes gigabytes, and minutes in
which the rank could not train.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from clusterddp.entry import exit_with
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.files import create_folder, replacing, write_atomically

NICENESS = 10
#: Bytes of the trace that are read at a time, and the most that one event may have.
BLOCK, LONGEST_EVENT = 1 << 20, 1 << 24
#: The rows of each table, and the characters of a name in it.
ROWS, LONGEST_NAME = 20, 60
#: Kinds of events: spans of a thread, one inside the other, and work of the GPU.
_SPANS = frozenset(("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"))
_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))


def main() -> int:
    """Stores the trace on standard input as TARGET, and the table beside it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: sys.exit(1))  # the temporary file is deleted
    os.nice(NICENESS)
    try:
        store(sys.stdin.buffer, Path(sys.argv[1]))
    except OSError as error:
        raise RunDirectoryError(f"{error.strerror}: {error.filename}") from error
    return 0


def store(trace: IO[bytes], target: Path) -> None:
    """Writes both files, each whole or not at all, and creates their folders.

    Raises OSError, and RunDirectoryError for a trace that is not complete.
    """
    for folder in (target.parent.parent, target.parent):
        create_folder(folder, exist_ok=True)
    operators = Operators()
    with replacing(target) as file, gzip.GzipFile("", "wb", 6, file) as packed:
        for event in events(_copied(trace, packed)):
            operators.add(event)
    write_atomically(table_file(target), operators.text())


def table_file(target: Path) -> Path:
    """The table that belongs to a trace."""
    return target.with_name(f"{target.name.split('.')[0]}.txt")


def _copied(source: IO[bytes], target: gzip.GzipFile) -> Iterator[str]:
    """The text of a file, in blocks of whole lines; each is also written to ``target``."""
    while block := source.read(BLOCK):
        block += source.readline()
        target.write(block)
        yield block.decode(errors="replace")


def events(blocks: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """The events of a trace, one at a time. RunDirectoryError if it ends before its last event."""
    decode, buffer, at, begun = json.JSONDecoder().raw_decode, "", 0, False
    for block in blocks:
        buffer, at = buffer[at:] + block, 0
        if not begun:
            match = re.search(r'"traceEvents"\s*:\s*\[', buffer)
            begun, at = match is not None, match.end() if match else 0
        while begun and (at := _past_comma(buffer, at)) < len(buffer):
            if buffer[at] == "]":
                for more in blocks:  # what follows the events is only copied
                    buffer = more
                if not buffer.rstrip().endswith("}"):
                    break
                return
            try:
                event, at = decode(buffer, at)
            except ValueError:  # it continues in the next block
                break
            yield event
        if len(buffer) - at > LONGEST_EVENT:
            break
    raise RunDirectoryError("the trace is not complete: the node's temporary folder may be full")


_BETWEEN = re.compile(r"[\s,]*")


def _past_comma(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    return match.end() if match else at


class Operators:
    """Sums over the events of a trace. An event takes some 40 bytes here."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # Of each span, in microseconds:
        self._name, self._thread, self._external = array("i"), array("q"), array("q")
        self._begin, self._lasted = array("d"), array("d")
        #: Microseconds of GPU work by the operator that launched it, by its "External id", and by kernel.
        self._launched: Counter[int] = Counter()
        self._kernels: dict[str, list[float]] = {}
        self._steps = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Counts an event of a trace; those that are no spans of time do not count."""
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in _SPANS | _GPU:
            return
        lasted, external = float(event.get("dur", 0)), event.get("args", {}).get("External id", -1)
        if kind in _GPU:
            self._launched[external] += lasted  # type: ignore[assignment]
            total = self._kernels.setdefault(str(event["name"]), [0.0, 0])
            total[0] += lasted
            total[1] += 1
            return
        name = str(event["name"])
        if name.startswith("ProfilerStep#"):
            self._steps += 1
            name = "ProfilerStep*"
        self._name.append(self._numbers.setdefault(name, len(self._numbers)))
        self._thread.append(int(event.get("tid", 0)))
        self._external.append(external if kind == "cpu_op" else -1)
        self._begin.append(float(event["ts"]))
        self._lasted.append(lasted)

    def text(self) -> str:
        """The tables: operators by their own CPU time, and, with a GPU, operators and kernels by GPU time."""
        names, own = list(self._numbers), self._own_times()
        cpu: dict[str, list[float]] = {name: [0.0, 0] for name in names}
        gpu: dict[str, list[float]] = {name: [0.0, 0] for name in names}
        for index, number in enumerate(self._name):
            name = names[number]
            cpu[name][0] += own[index]
            cpu[name][1] += 1
            if (spent := self._launched.get(self._external[index], 0)) and self._external[index] >= 0:
                gpu[name][0] += spent
                gpu[name][1] += 1
        parts = [_table("operators by self CPU time", cpu, self._steps)]
        if self._kernels:
            parts += [_table("operators by self CUDA time", gpu, self._steps)]
            parts += [_table("kernels by CUDA time", self._kernels, self._steps)]
        return "\n".join(parts)

    def _own_times(self) -> array[float]:
        """Of each span, its time without that of the spans inside it, which are those of the same thread."""
        own = array("d", self._lasted)
        order = sorted(range(len(own)), key=lambda one: (self._thread[one], self._begin[one], -self._lasted[one]))
        around: list[int] = []
        for span in order:
            while around and not self._within(span, around[-1]):
                around.pop()
            if around:
                own[around[-1]] -= self._lasted[span]
            around.append(span)
        return own

    def _within(self, span: int, other: int) -> bool:
        end = self._begin[other] + self._lasted[other]
        return self._thread[span] == self._thread[other] and self._begin[span] < end


def _table(title: str, totals: Mapping[str, list[float]], steps: int) -> str:
    """The rows with the most time: its share, milliseconds in all and per step, and how often."""
    whole = sum(total for total, _ in totals.values()) or 1.0
    rows = sorted(((total, count, name) for name, (total, count) in totals.items() if total > 0), reverse=True)
    lines = [title, f"{'share':>7} {'ms':>12} {'ms/step':>10} {'calls':>9}  name"]
    for total, count, name in rows[:ROWS]:
        short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 4]} ..."
        per_step = f"{total / 1000 / steps:10.3f}" if steps else f"{'':10}"
        lines.append(f"{total / whole:7.1%} {total / 1000:12.3f} {per_step} {count:9.0f}  {short}")
    if len(rows) > ROWS:
        lines.append(f"{'':7} {sum(total for total, _, _ in rows[ROWS:]) / 1000:12.3f} {'':10} {'':9}  others")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    exit_with(main)
