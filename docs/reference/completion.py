"""Writes the completion files for bash and zsh from the options in the code: ``make completion``.

shtab makes them here, so that nothing has to be imported when a user presses Tab.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import shtab

from clusterddp.cli.command_line import parser

FOLDER = Path(__file__).resolve().parents[2] / "completions"
#: By shell: the name that its completion loads a command's file by.
FILES = {"bash": "bash/clusterddp", "zsh": "zsh/_clusterddp"}


def files() -> dict[str, str]:
    """The text of each file, by its path below ``completions``."""
    described = parser()
    complete_values(described)
    texts = {name: str(shtab.complete(described, shell)) for shell, name in FILES.items()}
    return {name: re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip() + "\n" for name, text in texts.items()}


def complete_values(command: argparse.ArgumentParser) -> None:
    """Says how each argument's value is completed, by its placeholder: as a folder, as a file, or as a word."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                complete_values(choice)
        elif action.nargs != 0 and isinstance(action.metavar, str):
            if re.search(r"RUN|DIR|FOLDER", action.metavar):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif re.search(r"FILE|\.yaml", action.metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif re.fullmatch(r"[a-z]+(\|[a-z]+)+", action.metavar):
                action.choices = action.metavar.split("|")


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text)
