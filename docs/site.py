"""``python -m docs.site``, which ``make docs`` runs: the documentation as a site, in build/docs/site.

The pages are those of the repository, at the same places, so that each link works in both. The index, docs/README.md,
gives the navigation its order; a page that it does not link is an error, like a link or an anchor that does not exist.

Zensical (MIT) builds the site. Its authors made Material for MkDocs, which gets only security fixes since 2026, as
MkDocs itself has had no release since 2024. Pages and search load nothing from other hosts.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

BUILD = Path("build", "docs")
INDEX = PurePosixPath("docs/README.md")
#: Pages that the README links instead of the index.
ABOUT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")

Nav = list[dict[str, "str | Nav"]]


def main() -> int:
    pages = BUILD / "pages"
    shutil.rmtree(BUILD, ignore_errors=True)
    listed = pages_of_the_repository()
    for name in [*listed, *sorted(linked_files(listed))]:
        copy = pages / file_on_the_site(name, listed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, copy)
    for name in listed:
        (pages / name).write_text(with_links_of_the_site(name, listed))
    sections = navigation(Path(INDEX).read_text())
    shown = {str(page) for section in sections for part in section.values() for page in paths(part)}
    if missing := set(listed) - shown:
        print(f"{INDEX} does not link {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    nav = ",\n  ".join(inline(section) for section in sections)
    (BUILD / "zensical.toml").write_text(
        Path("docs/site.toml").read_text().replace("[project]", f"[project]\nnav = [\n  {nav}\n]", 1)
    )
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "-f", str(BUILD / "zensical.toml")]
    return subprocess.run(command, check=False).returncode


def pages_of_the_repository() -> list[str]:
    """All pages, without what tests and benchmarks have written."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in found if not name.startswith(("tests/", "benchmarks/")) and Path(name).exists()]


def linked_files(pages: Sequence[str]) -> set[str]:
    """What pages link besides pages: examples, schemas, pictures, results."""
    found = set()
    for page in pages:
        text = Path(page).read_text()
        for target in [target for _, target in LINK.findall(text)] + re.findall(r'(?:src|srcset)="([^"]+)"', text):
            if ":" not in target:
                found.add(str(normal(PurePosixPath(page).parent / target)))
    found -= set(pages)
    return {name for name in found if Path(name).is_file()}


def file_on_the_site(name: str, pages: Sequence[str]) -> str:
    """Markdown that is no page is shown as a text."""
    return f"{name}.txt" if name.endswith(".md") and name not in pages else name


def with_links_of_the_site(page: str, pages: Sequence[str]) -> str:
    """A page's text, with links to the texts that its Markdown files have become."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        name = str(normal(PurePosixPath(page).parent / target)) if ":" not in target else ""
        return found[0] if file_on_the_site(name, pages) == name else f"[{words}]({target}.txt)"

    return LINK.sub(link, Path(page).read_text())


def navigation(index: str) -> Nav:
    """The sections of the index with their pages, in its order."""
    sections: Nav = [{"Start": [{"clusterddp": "README.md"}, {"Contents": str(INDEX)}]}]
    seen = {"README.md", str(INDEX)}
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        links = [(words, str(normal(INDEX.parent / target))) for words, target in LINK.findall(text)]
        entries: Nav = []
        for words, page in links:
            if page not in seen and page.endswith(".md"):
                seen.add(page)
                entries.append({words: page})
        sections.append({title: entries})
    sections.append({"About": [{name.removesuffix(".md").capitalize(): name} for name in ABOUT if name not in seen]})
    return sections


def normal(path: PurePosixPath) -> PurePosixPath:
    """Without ``..``, which is always a folder of the repository here."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def paths(part: str | Nav) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [page for entry in part for one in entry.values() for page in paths(one)]


def inline(section: dict[str, str | Nav]) -> str:
    """A section as a TOML value; strings are written as in JSON."""
    ((title, part),) = section.items()
    entries = part if isinstance(part, str) else [inline(entry) for entry in part]
    value = json.dumps(entries) if isinstance(entries, str) else f"[{', '.join(entries)}]"
    return f"{{{json.dumps(title)} = {value}}}"


if __name__ == "__main__":
    sys.exit(main())
