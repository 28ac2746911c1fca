"""The rows of the input benchmark, and that it finds what is below the bar."""

from __future__ import annotations

from benchmarks import input as bench


def met(ours: list[float]) -> tuple[bool | None, str]:
    row = bench.time_row("a", {bench.OURS: ours, bench.TORCH: [10e-6] * 3})
    return row.met, row.limit_is


def test_a_batch_is_compared_with_torchs() -> None:
    assert met([9e-6, 10.5e-6, 10e-6]) == (True, bench.TORCH)
    assert met([11e-6, 11e-6, 11e-6]) == (False, bench.TORCH)


def test_a_resume_is_compared_with_the_start_of_an_empty_loader() -> None:
    def met(seconds: float) -> bool | None:
        return bench.resume_row(2, {bench.OURS: [seconds], bench.EMPTY: [1.0]}).met

    assert met(1.15) and not met(1.25)
