"""The page with all figures, and the README's table: both are what their JSON files say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import page, report, rows

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / page.FOLDER
CHOSEN = next(iter(page.CHOICE))
ROW = rows.paired(CHOSEN, "us", [1.2, 1.3, 1.1], [1.0, 1.0, 1.0], "a bare loop", allowed=1.1).as_json()


def test_the_page_is_what_the_files_say() -> None:
    """After a measurement: ``python -m benchmarks.page``."""
    assert (FOLDER / "README.md").read_text() == page.page(FOLDER)


def test_the_readmes_figures_are_those_of_the_files() -> None:
    """If it has the comments between which the table belongs."""
    table = page.choice(page.gathered(FOLDER))
    assert page.fragment((FOLDER / "README.md").read_text()) == table
    text = (REPOSITORY / "README.md").read_text()
    assert page.filled(text, table) == text


def test_the_readme_shows_at_most_six_rows_that_have_been_measured() -> None:
    measured = {row["row"] for row in page.gathered(FOLDER) if "failed" not in row}
    assert len(page.CHOICE) <= 6 and page.CHOICE.keys() <= measured


def test_another_figure_or_a_table_by_hand_is_noticed() -> None:
    text = f"# Title\n\n{page.BEGIN}\n| by hand |\n{page.END}\n\nThe end.\n"
    assert page.fragment(text) == "| by hand |"
    filled = page.filled(text, "| new |")
    assert page.fragment(filled) == "| new |" and filled.startswith("# Title") and filled.endswith("The end.\n")
    assert page.filled("no table", "| new |") == "no table"


def test_a_row_comes_from_its_own_page_before_it_comes_from_the_common_run(tmp_path: Path) -> None:
    longer = {**ROW, "ours": 7.0}
    (tmp_path / "steady-state.json").write_text(json.dumps({"rows": [longer]}))
    (tmp_path / "versions.json").write_text(json.dumps({"rows": {"python3.10": "another form"}}))
    short = [{**ROW, "benchmark": "steady-state"}, rows.failed("steady-state", "late"), rows.failed("saves", "no disk")]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": short}))
    found = page.gathered(tmp_path)
    assert [(row["row"], row["page"]) for row in found] == [(CHOSEN, "steady-state"), ("saves", "bench")]
    assert found[0]["ours"] == 7.0 and "7.00 us" in page.choice(found)


def test_missed_bars_are_named_with_their_reason(tmp_path: Path) -> None:
    begin, reason = next(iter(page.REASONS.items()))
    missed = {**ROW, "row": f"{begin} of a rank", "allowed": 1.0, "met": False}
    unknown = {**missed, "row": "something new"}
    undecided = {**ROW, "row": "undecided", "allowed": 1.15, "met": None}
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [missed, unknown, undecided]}))
    text = page.page(tmp_path)
    assert f"Missed: {reason}.\n\n- {begin} of a rank\n" in text
    assert "Missed: no reason found yet.\n\n- something new\n" in text
    assert f"{page.UNDECIDED}\n\n- undecided\n" in text


def test_a_measurement_writes_the_page_and_the_readmes_table_again(tmp_path: Path) -> None:
    folder, readme = tmp_path / "docs" / "measurements", tmp_path / "README.md"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("an older page")
    readme.write_text(f"# Title\n{page.BEGIN}\nan older table\n{page.END}\n")
    report.write(folder, "steady-state", "# A page", {"rows": [ROW]})
    assert (folder / "README.md").read_text() == page.page(folder)
    assert page.fragment(readme.read_text()) == page.choice([ROW]) and "1.20 us" in readme.read_text()


def test_rows_of_gpus_are_marked_as_not_run_until_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "steady-state.json").write_text(json.dumps({"rows": [ROW]}))
    assert "## On GPUs\n\nNot run:" in page.page(tmp_path)
    (tmp_path / "gpu-check.json").write_text(json.dumps({"rows": [{**ROW, "row": "step (cuda, 1 ranks): loop"}]}))
    assert "## On GPUs" not in page.page(tmp_path)
