"""Presets: pieces of a job definition for the training repositories of others, by name: ``presets/NAME.yaml``.

``resume: NAME`` takes all keys of the file; the keys of the job definition win. The first line of the file, a comment,
says which script it is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from clusterddp.jobdef import yaml12
from clusterddp.jobdef.placeholders import used
from clusterddp.jobdef.schema import READERS, Fields
from clusterddp.jobdef.values import did_you_mean, quoted
from clusterddp.jobdef.yaml12 import Mistake, Node
from clusterddp.process import PACKAGE_FOLDER

FOLDER = PACKAGE_FOLDER / "clusterddp" / "presets"
#: Keys of a job definition that no preset has.
_OF_ONE_JOB = {"job_name", "script", "module"}
KEYS = {key: reader for key, reader in READERS.items() if key not in _OF_ONE_JOB}


def names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def text_of(name: str) -> str:
    """The file of a preset."""
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def purpose(name: str) -> str:
    """Which script it is for, in a line."""
    return text_of(name).partition("\n")[0].lstrip("# ")


def with_preset(layers: Sequence[Fields], mistakes: list[Mistake]) -> list[Fields]:
    """The layers of a job definition with the preset that they name; of several names, the last one counts.

    It comes after the first layer, the profiles. Its ``args`` stay, except for options that the job's ``args`` have.
    """
    named: Node | None = None
    rest: list[Fields] = []
    for layer in layers:
        node = _get(layer, "resume")
        if node is None:
            rest.append(layer)
        elif isinstance(node.value, dict):
            chosen = _get(node.value, "preset")
            named = chosen if chosen is not None and chosen.value is not None else named
            inner = {key: item for key, item in node.value.items() if key != "preset"}
            rest.append(
                {key: dataclasses.replace(node, value=inner) if key == "resume" else layer[key] for key in layer}
            )
        elif isinstance(node.value, list):
            rest.append(layer)  # a mistake
        else:  # a name, or a null, takes the place of what the layers before it say
            named = node if node.value is not None else None
            rest = [{key: item for key, item in one.items() if key != "resume"} for one in [*rest, layer]]
    if named is None:
        return rest
    if named.text not in names():
        hint = did_you_mean(named.text, names()) or f"; presets: {', '.join(names())}"
        expected = "expected a mapping with checkpoint: PATTERN, or the name of a preset"
        mistakes.append(Mistake(named.place, f"resume: {expected}, got {quoted(named)}{hint}"))
        return rest
    root = yaml12.load(text_of(named.text), f"preset {named.text}")
    preset = root.value if isinstance(root.value, dict) else {}
    given = [(index, node) for index, layer in enumerate(rest) if (node := _get(layer, "args")) is not None]
    if given and isinstance(given[-1][1].value, list):
        index, node = given[-1]
        elsewhere = any(_has_checkpoint(layer) for layer in rest)
        more = _added_arguments(preset, node, None if elsewhere else named, mistakes)
        joined = dataclasses.replace(node, value=[*_items(node), *more])
        rest[index] = {key: joined if key == "args" else item for key, item in rest[index].items()}
    return [*rest[:1], preset, *rest[1:]]


def _added_arguments(preset: Fields, given: Node, named: Node | None, mistakes: list[Mistake]) -> list[Node]:
    """The preset's arguments without the options that the job's own have.

    ``named``: the preset's name if it says where the checkpoints are: then the options with the folder must be its own.
    """
    words = [item.text for item in _items(given)]
    kept: list[Node] = []
    for option in _options(_items(_get(preset, "args"))):
        name = option[0].text.partition("=")[0]
        if not any(word == name or word.startswith(f"{name}=") for word in words):
            kept += option
        elif named is not None and any("run_dir" in used(item.text) for item in option):
            written = " ".join(item.text for item in option)
            what = f"args: {name} is also set by the preset {named.text} ({written}), which looks for checkpoints there"
            mistakes.append(Mistake(given.place, f"{what}: remove it, or set resume.checkpoint, too"))
    return kept


def _options(words: Sequence[Node]) -> Iterator[list[Node]]:
    """Each option with the words that follow it."""
    option: list[Node] = []
    for word in words:
        if word.text.startswith("-") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _has_checkpoint(layer: Fields) -> bool:
    node = _get(layer, "resume")
    return node is not None and isinstance(node.value, dict) and _get(node.value, "checkpoint") is not None


def _items(node: Node | None) -> list[Node]:
    return node.value if node is not None and isinstance(node.value, list) else []


def _get(fields: Fields, name: str) -> Node | None:
    return next((node for key, node in fields.items() if key == name), None)
