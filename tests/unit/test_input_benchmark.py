"""The rows of the input benchmark, and that it finds what is below the bar."""

from __future__ import annotations

from typing import Any

from benchmarks import input as bench


def met(ours: list[float]) -> tuple[bool | None, str]:
    others = {bench.TORCH: [10e-6] * 3, bench.TORCHDATA: [8e-6] * 3}
    times: list[dict[str, Any]] = [{"case": "a", "rank": 0, "times": {bench.OURS: ours, **others}}]
    row = bench.time_row(times, "a")
    return row.met, row.limit_is


def test_a_batch_is_compared_with_torchs() -> None:
    assert met([9e-6, 10.5e-6, 10e-6]) == (True, bench.TORCH)
    assert met([11e-6, 11e-6, 11e-6]) == (False, bench.TORCH)


def test_a_resume_is_compared_with_the_start_of_an_empty_loader() -> None:
    def met(seconds: float) -> bool | None:
        taken = {bench.OURS: [seconds], bench.TORCHDATA: [9.0], bench.EMPTY: [1.0]}
        return bench.resume_row([{"workers": 2, "rank": 0, "seconds": taken}], 2).met

    assert met(1.15) and not met(1.25)
