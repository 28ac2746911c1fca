"""Readers of single values in a job definition: each returns the value of a YAML node, or raises ``Wrong``."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable

from clusterddp.jobdef.secrets import is_secret
from clusterddp.jobdef.yaml12 import Node


class Wrong(Exception):
    """A value that its key does not accept. The message follows the key's place and name."""


def text(node: Node) -> str:
    """Nonempty text on one line, including text that YAML reads as a number or a boolean."""
    if isinstance(node.value, (dict, list)):
        raise Wrong(f"expected text, got {node.quoted}. Quote it if it is meant as text")
    if not node.text:
        raise Wrong("expected text, got an empty value")
    for character in node.text:  # text after a line break would be an option or a command in the batch script
        if not character.isprintable():
            raise Wrong(f"expected text without line breaks or control characters, got U+{ord(character):04X}")
    return node.text


def word(node: Node) -> str:
    """Text without blanks and quotes, which would split it on an #SBATCH line."""
    given = text(node)
    if re.search(r"[\s\"'\\]", given):
        raise Wrong(f"expected one word without blanks, quotes or backslashes, got {given!r}")
    return given


def matching(pattern: str, expected: str) -> Callable[[Node], str]:
    """A reader of text that matches a regular expression, which ``expected`` describes in words."""

    def read(node: Node) -> str:
        given = text(node)
        if not re.fullmatch(pattern, given):
            raise Wrong(f"expected {expected}, got {given!r}")
        return given

    return read


def regex(node: Node) -> str:
    """A regular expression of Python."""
    given = text(node)
    try:
        re.compile(given)
    except re.error as error:
        raise Wrong(f"expected a regular expression, got {given!r}: {error}") from error
    return given


def name(node: Node) -> str:
    """A job's name, also that of its run directory."""
    expected = "a name of letters, digits and the characters _.+=@- that does not begin with . or -"
    given = matching(r"[\w+=@][\w.+=@-]*", expected)(node)
    if len(given.encode()) > 200:
        raise Wrong(f"expected at most 200 bytes (the run directory has this name), got {len(given.encode())}")
    return given


def choice(*choices: str) -> Callable[[Node], str]:
    """A reader of one of these words."""

    def read(node: Node) -> str:
        if node.text not in choices:
            hint = ". Did you mean 'cuda'?" if node.text == "gpu" else did_you_mean(node.text, choices)
            raise Wrong(f"expected {' or '.join(choices)}, got {node.quoted}{hint}")
        return node.text

    return read


def backend(node: Node) -> str:
    """The process group's backend."""
    if node.text == "mpi":
        raise Wrong(
            "expected nccl or gloo, got 'mpi'. For MPI, start the script with mpirun and call init(backend='mpi')"
        )
    return choice("nccl", "gloo")(node)


def whole(least: int, most: int | None = None) -> Callable[[Node], int]:
    """A reader of a whole number of at least ``least`` and at most ``most``."""
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(node: Node) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most or value) < value:
            raise Wrong(f"expected a whole number {expected}, got {node.quoted}")
        return value

    return read


def positive(unit: str) -> Callable[[Node], float]:
    """A reader of a positive number of ``unit``."""

    def read(node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise Wrong(f"expected a positive number of {unit}, got {node.quoted}")
        return float(value)

    return read


def truth(node: Node) -> bool:
    """A boolean."""
    if not isinstance(node.value, bool):
        raise Wrong(f"expected true or false, got {node.quoted}")
    return node.value


def _argument(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or (node.value is None and not node.text):
        hint = "" if node.value is None else ". Quote it if it is meant as text"
        raise Wrong(f"expected only text and numbers in the list, got {node.quoted}{hint}")
    if "\0" in node.text:
        raise Wrong("expected arguments without U+0000")
    return node.text


def arguments(node: Node) -> tuple[str, ...]:
    """A list of arguments, each as written: ``1e-3`` stays ``1e-3``."""
    if not isinstance(node.value, list):
        raise Wrong(f"expected a list such as [--lr, 1e-3], got {node.quoted}")
    return tuple(_argument(item) for item in node.value)


def patterns(node: Node) -> tuple[str, ...]:
    """A pattern of file names, or a list of them."""
    if isinstance(node.value, list) and node.value:
        return tuple(text(item) for item in node.value)
    if isinstance(node.value, (dict, list)):
        raise Wrong(f'expected a pattern such as "{{run_dir}}/out/*.pth", or a list of them, got {node.quoted}')
    return (text(node),)


def command(node: Node) -> tuple[str, ...]:
    """A command as a list of words, or as one line for ``sh``."""
    if isinstance(node.value, list) and node.value:
        return arguments(node)
    if isinstance(node.value, (dict, list)) or not node.text:
        raise Wrong(
            f"expected a command as a list, such as [python, notify.py], or as a line for sh, got {node.quoted}"
        )
    return ("/bin/sh", "-c", text(node))


def snapshot(node: Node) -> bool | str:
    """Whether to take a snapshot of the code, or its maximum size."""
    if isinstance(node.value, bool):
        return node.value
    if not re.fullmatch(r"[1-9][0-9]{0,5}[MG]", node.text, re.ASCII):
        raise Wrong(f"expected true, false, or a size such as 500M or 2G, got {node.quoted}")
    return node.text


def shell_lines(node: Node) -> tuple[str, ...]:
    """A list of lines, or one block of text. An item with a line break is two lines."""
    items = [_argument(item) for item in node.value] if isinstance(node.value, list) else [_block(node)]
    lines = [line for item in items for line in item.removesuffix("\n").split("\n")]
    for line in lines:
        if any(unicodedata.category(character) == "Cc" and character != "\t" for character in line):
            raise Wrong(f"expected shell lines without control characters, got {line!r}")
        for variable_name in ASSIGNMENT.findall(line):
            if is_secret(variable_name):
                raise Wrong(
                    f"{variable_name} would be stored in the batch script, which Slurm keeps. Set it under env:, or "
                    f"read it from a file: export {variable_name}=$(cat FILE)"
                )
    return tuple(lines)


#: A variable that is assigned a literal value.
ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(])(\w+)=["']?[^\s"'$`;]""")


def _block(node: Node) -> str:
    if isinstance(node.value, dict) or not node.text:
        raise Wrong(f"expected a list of shell lines, got {node.quoted}")
    return node.text


def time(node: Node) -> int:
    """A time in one of Slurm's formats, in seconds."""
    match = _TIME.fullmatch(node.text)
    if not match:
        raise Wrong(
            "expected a time in sbatch's format (minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S), such as 30, 1:30:00 or "
            f"2-12, got {node.quoted}"
        )
    days, *parts = (int(part or 0) for part in match.groups())
    hours, minutes, seconds = parts if match[1] or match[4] else (0, *parts[:2])  # minutes, or M:S
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise Wrong(
            f"expected a time limit above 0, got {node.quoted}. Without the key, the partition's default applies"
        )
    return total


_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)


def variable(node: Node) -> str:
    """An environment variable's value."""
    if isinstance(node.value, (dict, list)) or "\0" in node.text:
        raise Wrong(f"expected text, got {'text with U+0000' if node.text else node.quoted}")
    return node.text


def option(node: Node) -> str | bool:
    """The value of a Slurm option. True or false for one that takes no value."""
    return node.value if isinstance(node.value, bool) else text(node)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message with the known name that was probably meant, or an empty text."""
    names, spelt = list(known), given.lower().replace("-", "_")
    near = [known_name for known_name in names if known_name == spelt] or difflib.get_close_matches(spelt, names, 1)
    near = near or [known_name for known_name in names if len(spelt) > 2 and known_name.startswith(spelt)]
    return f". Did you mean {near[0]!r}?" if near else ""
