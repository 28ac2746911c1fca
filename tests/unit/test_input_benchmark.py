"""The table of the input benchmark, and that it finds what is below the bar."""

from __future__ import annotations

from benchmarks import input as bench


def rates(ours: list[float]) -> list[dict[str, object]]:
    others = {bench.TORCH: [10.0, 10.0, 10.0], bench.TORCHDATA: [8.0, 8.0, 8.0]}
    return [{"dataset": "cheap", "workers": 0, "rank": 0, "rates": {bench.OURS: ours, **others}}]


def test_a_rate_is_compared_with_the_better_of_the_others() -> None:
    assert bench.compared(rates([9.0, 10.5, 10.0]), "cheap", 0)[1]
    row, met = bench.compared(rates([9.0, 9.0, 9.0]), "cheap", 0)
    assert not met and row[-2:] == ["0.90 (0.90 to 0.90)", "**not met**"]


def test_a_resume_is_compared_with_the_start_of_an_empty_loader() -> None:
    def met(seconds: float) -> bool:
        taken = {bench.OURS: [seconds], bench.TORCHDATA: [9.0], bench.EMPTY: [1.0]}
        return bench.resume_row([{"workers": 2, "rank": 0, "seconds": taken}], 2)[1]

    assert met(1.15) and not met(1.25)
