"""Presets: pieces of a job definition for public training repositories.

``resume: NAME`` takes all keys of ``presets/NAME.yaml``. The file's first line, a comment, names the script that it is
for. A job definition overrides its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from clusterddp.jobdef import kinds, yaml12
from clusterddp.jobdef.program import placeholders_in
from clusterddp.jobdef.yaml12 import get
from clusterddp.keys.kinds import did_you_mean
from clusterddp.keys.node import Fields, Mistake, Node, PresetSource


def preset_text(name: str) -> str:
    """The file of a preset."""
    return (kinds.PRESETS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def preset_purpose(name: str) -> str:
    """One line with the script that it is for."""
    return preset_text(name).partition("\n")[0].lstrip("# ")


def with_preset(layers: Sequence[Fields], mistakes: list[Mistake]) -> list[Fields]:
    """The layers of a job definition with the preset that they name. Of several names, the last one counts.

    It comes after the first layer, the configuration files. The job's ``args`` replace those of its ``args`` that set
    the same options.
    """
    named: Node | None = None
    rest: list[Fields] = []
    for layer in layers:
        node = get(layer, "resume")
        if node is None:
            rest.append(layer)
        elif isinstance(node.value, dict):
            chosen = get(node.value, "preset")
            named = chosen if chosen is not None and chosen.value is not None else named
            inner = {key: item for key, item in node.value.items() if key != "preset"}
            rest.append(
                {key: dataclasses.replace(node, value=inner) if key == "resume" else layer[key] for key in layer}
            )
        elif isinstance(node.value, list):
            rest.append(layer)  # a mistake
        else:  # a name or a null replaces the value of earlier layers
            named = node if node.value is not None else None
            rest = [{key: item for key, item in one.items() if key != "resume"} for one in [*rest, layer]]
    if named is None:
        return rest
    if named.text not in kinds.preset_names():
        hint = did_you_mean(named.text, kinds.preset_names()) or f". Presets: {', '.join(kinds.preset_names())}"
        expected = "expected a mapping with checkpoint: PATTERN, or the name of a preset"
        mistakes.append(Mistake(named.place, f"resume: {expected}, got {named.quoted}{hint}", "resume"))
        return rest
    root = yaml12.load(preset_text(named.text), PresetSource(f"preset {named.text}"))
    preset = root.value if isinstance(root.value, dict) else {}
    given = [(index, node) for index, layer in enumerate(rest) if (node := get(layer, "args")) is not None]
    if given and isinstance(given[-1][1].value, list):
        index, node = given[-1]
        elsewhere = any(_has_checkpoint(layer) for layer in rest)
        more = _added_arguments(preset, node, None if elsewhere else named, mistakes)
        joined = dataclasses.replace(node, value=[*_items(node), *more])
        rest[index] = {key: joined if key == "args" else item for key, item in rest[index].items()}
    return [*rest[:1], preset, *rest[1:]]


def _added_arguments(preset: Fields, given: Node, named: Node | None, mistakes: list[Mistake]) -> list[Node]:
    """The preset's arguments without the options that the job's own have.

    ``named``: the preset's name if it sets the place of the checkpoints. Options with the folder must then be its own.
    """
    words = [item.text for item in _items(given)]
    kept: list[Node] = []
    for option in _options(_items(get(preset, "args"))):
        name = option[0].text.partition("=")[0]
        if not any(word == name or word.startswith(f"{name}=") for word in words):
            kept += option
        elif named is not None and any("run_dir" in placeholders_in(item.text) for item in option):
            written = " ".join(item.text for item in option)
            what = f"args: {name} is also set by the preset {named.text} ({written}), which looks for checkpoints there"
            mistakes.append(Mistake(given.place, f"{what}. Remove it, or also set resume.checkpoint"))
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
    node = get(layer, "resume")
    return node is not None and isinstance(node.value, dict) and get(node.value, "checkpoint") is not None


def _items(node: Node | None) -> list[Node]:
    return node.value if node is not None and isinstance(node.value, list) else []
