"""The pages' links exist, and every page can be found from the index."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
PAGES = sorted(set(LISTED.stdout.split()))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of the links of a page, web addresses excluded."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@cache
def anchors(page: Path) -> set[str]:
    """A page's headings as GitHub forms their anchors."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_relative_link_and_anchor_exists(name: str) -> None:
    page = REPOSITORY / name
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name} links to {link}: no such heading"


def test_the_index_calls_a_page_by_its_title() -> None:
    """The navigation of the site takes its words from the index."""
    rows = re.findall(
        r"^\| \[([^\]]+)\]\(([^)#]+\.md)\)", (REPOSITORY / "docs" / "README.md").read_text(), re.MULTILINE
    )
    assert rows
    for words, page in rows:
        (title, *_) = re.findall(r"^# (.*)$", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE)
        assert words == title, page


def test_every_page_is_in_the_index() -> None:
    index = REPOSITORY / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    for name in PAGES:
        if name.startswith("docs/") and name != "docs/README.md":
            assert (REPOSITORY / name).resolve() in listed, f"docs/README.md does not link to {name}"
