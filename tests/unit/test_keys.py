"""A field of a dataclass is a key: its reader, writer and JSON Schema follow from the field alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from clusterddp.jobdef import yaml12
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.load import load, load_resolved
from clusterddp.keys.kinds import positive, whole
from clusterddp.keys.node import Mistake
from clusterddp.keys.table import Named, Option, Parts, Short, entries, properties, read_fields, written
from clusterddp.trackers.registry import TRACKERS


@dataclass(frozen=True)
class Oven:
    """A section."""

    degrees: int = 180
    """How hot it is."""
    mode: Literal["fan", "grill"] | None = None
    """Where the heat comes from."""


@dataclass(frozen=True)
class Cake:
    """A definition."""

    eggs: int = 2
    """How many."""
    vegan: bool = False
    """Without eggs."""
    bake_s: Annotated[float | None, Named("bake"), positive("seconds"), Option("-b, --bake S", "how long")] = None
    """How long it is in the oven."""
    layers: Annotated[int, whole(0)] = 1
    """From the bottom."""
    oven: Annotated[Oven, Short(Oven, "degrees", "degrees, or a mapping")] = dataclasses.field(default_factory=Oven)
    """The oven: ``200`` or ``{mode: fan}``."""
    toppings: tuple[str, ...] | None = None
    """On top. None: sugar."""


def read(text: str) -> tuple[Any, list[str]]:
    """The cake, and the mistakes."""
    mistakes: list[Mistake] = []
    values = read_fields(yaml12.fields_of(yaml12.load(text, "f"), mistakes), entries(Cake), mistakes)
    return Cake(**values), [str(mistake) for mistake in mistakes]


def test_a_field_is_read_by_its_type_and_its_annotation() -> None:
    cake, mistakes = read("{eggs: 3, vegan: true, bake: 90, layers: 0, oven: {mode: grill}, toppings: [cream]}")
    assert (cake, mistakes) == (Cake(3, True, 90.0, 0, Oven(180, "grill"), ("cream",)), [])
    assert read("oven: 200")[0] == Cake(oven=Oven(200))


def test_mistakes_have_the_place_and_the_dotted_key() -> None:
    _, mistakes = read("eggs: 0\nbaek: 3\noven: {mode: fna}\nlayers: -1\n")
    assert [mistake.split(": ")[0:2] for mistake in mistakes] == [
        ["f:2:1", "unknown key 'baek'. Did you mean 'bake'?"],
        ["f:1:7", "eggs"],
        ["f:3:14", "oven.mode"],
        ["f:4:9", "layers"],
    ]


def test_what_is_written_is_read_back_equal() -> None:
    """A section is short where it can be. An empty list is written where it differs from the default."""
    cake = Cake(bake_s=1.5, toppings=(), oven=Oven(200))
    assert written(cake, entries(Cake)) == {
        "eggs": 2,
        "vegan": False,
        "bake": 1.5,
        "layers": 1,
        "oven": 200,
        "toppings": (),
    }
    assert written(Cake(oven=Oven(mode="fan")), entries(Cake))["oven"] == {"degrees": 180, "mode": "fan"}


def test_the_schema_has_types_defaults_and_docstrings() -> None:
    schema = properties(entries(Cake), written(Cake(), entries(Cake)))
    assert schema["eggs"] == {"description": "How many.", "default": 2, "type": ["integer", "null"], "minimum": 1}
    assert schema["bake"]["exclusiveMinimum"] == 0 and schema["oven"]["default"] == 180
    (mapping,) = [part for part in schema["oven"]["anyOf"] if part.get("type") == "object"]
    assert mapping["properties"]["mode"]["enum"] == ["fan", "grill", None]


def test_an_option_says_its_flags_and_the_name_of_its_value() -> None:
    option = entries(Cake)["bake"].mark(Option)
    assert option is not None and (option.flags, option.metavar) == (["-b", "--bake"], "S")


def test_every_field_of_a_job_is_set_by_one_key() -> None:
    """Fields of the same key are named by it, such as `min_nodes` by `nodes`. Those of trackers are in one field."""
    fields = [name for key, entry in KEYS.items() if key not in TRACKERS for name in entry.fields]
    assert sorted([*fields, "trackers"]) == sorted(item.name for item in dataclasses.fields(Job))
    assert KEYS["nodes"].fields == ("nodes", "min_nodes") and isinstance(KEYS["nodes"].mark(Parts), Parts)


@pytest.mark.parametrize("replace", ["[]", "[a]"])
def test_arguments_that_replace_all_others_are_recorded_even_if_there_are_none(replace: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"script: train.py\nresume: {{checkpoint: a.pt, replace: {replace}}}\n")
    job = load(tmp_path / "job.yaml")
    (tmp_path / "recorded.yaml").write_text(job.to_yaml())
    assert load_resolved(tmp_path / "recorded.yaml") == job
