"""Compares what ``clusterddp report`` says of an interrupted run's time and interruptions with the recomputation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.booking_truth import Record, faults, seconds, spans

#: A category is right within this share of its seconds, or within so many seconds.
SHARE, LEAST_S = 0.02, 1.0
#: The most of the time that may be unknown.
UNKNOWN = 0.02
#: What the timeline must say of the attempt that a fault ended.
CAUSES = {
    "preemption": r"preempted$",
    "long_preemption": r"preempted$",
    "preemption_without_grace": r"preempted without grace$",
    "time_limit": r"stopped before the time limit$",
    "kill": r"rank \d \(n\d\) was killed by SIGKILL",
    "kill_all": r"rank \d \(n\d\) was killed by SIGKILL",
    "segv": r"rank \d \(n\d\) was killed by signal 11",
    "crash": r"rank 1 \(n\d\) raised RuntimeError: injected",
    "hang": r"rank \d \(n\d\) hung$",
    "dead_node": r"rank \d \(n\d\) was lost because node",
    "dead_batch_host": r"node n\d probably lost",
    "requeue": r"stopped by `clusterddp requeue`$",
    "held_requeue": r"stopped by `clusterddp requeue`$",
    "scontrol_requeue": r"requeued,? by `scontrol requeue`",
    "stop": r"stopped by `clusterddp stop`$",
}


@dataclass
class Soaked:
    """The run, as clusterddp reports it and as it was."""

    reported: Mapping[str, Any]
    records: Sequence[Record]
    truth: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = spans(self.records)
        self.truth = seconds(self.spans)

    def categories(self) -> list[tuple[str, float, float, bool]]:
        """Of each category: what it took, what is booked, whether that is right."""
        booked = self.reported["time"]["seconds"]
        found = []
        for name in dict.fromkeys([*booked, *self.truth]):
            was, says = self.truth.get(name, 0.0), booked.get(name, 0.0)
            found.append((name, was, says, abs(says - was) <= max(LEAST_S, SHARE * was)))
        return found

    def interruptions(self) -> list[tuple[str, int, str, bool]]:
        """Of each fault: its kind, its attempt, what the timeline says, whether that is its cause, at its time."""
        lanes = {lane["attempt"]: lane for lane in self.reported["attempts"]}
        found = []
        for fault in faults(self.records):
            lane = lanes.get(fault.attempt, {"how": "missing", "begin": 0.0, "end": 0.0})
            right = re.search(CAUSES[fault.kind], lane["how"]) is not None
            # Of one without a record of its end, the lane ends with its last sign.
            timely = lane["begin"] <= fault.time <= lane["end"] + LEAST_S
            found.append((fault.kind, fault.attempt, lane["how"], right and timely))
        return found

    def unknown(self) -> float:
        """The share of the time that is booked as unknown."""
        time = self.reported["time"]
        return float(time["seconds"]["unknown"] / time["total_s"])

    def wrong(self) -> list[tuple[object, ...]]:
        """The categories that are booked otherwise than the recomputation says, and the causes that are not right."""
        return [one for one in [*self.categories(), *self.interruptions()] if not one[-1]]

    def differences(self) -> list[str]:
        """For a post-mortem: the attempts whose booked seconds differ by more than a quarter of a second."""
        found = []
        for lane in self.reported["attempts"]:
            was = seconds(self.spans, lane["begin"], lane["end"])
            for name in {**was, **lane["seconds"]}:
                says, took = lane["seconds"].get(name, 0.0), was.get(name, 0.0)
                if abs(says - took) > 0.25:
                    found.append(f"attempt {lane['attempt']} ({lane['how']}): {name} {took:.2f}, booked {says:.2f}")
        return found
