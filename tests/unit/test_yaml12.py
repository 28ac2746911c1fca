"""YAML 1.2's core schema: values mean what they look like, and every mistake has its place."""

import math
from typing import Any

import pytest

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef.yaml12 import load, node_of, scalar
from clusterddp.keys.node import Key, Mistake, Node, Place, raise_mistakes


def plain(node: Node) -> Any:
    """The bare values."""
    if isinstance(node.value, dict):
        return {str(key): plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, word) for word in ("1:30:00", "190:20:30", "no", "yes", "on", "off", "y", "N", "2024-01-02", "1_000")],
        *[
            (word, word)
            for word in ("0b11", "<<", "=", "+0x1", "0o8", "1e", "e5", ".", "nULL", "tRUE", "2(x3)", "a100:4")
        ],
        *[("0123", 123), ("123", 123), ("-7", -7), ("+7", 7), ("0o17", 15), ("0x1F", 31), ("00", 0)],
        *[("1e-4", 1e-4), ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("-1E+3", -1000.0), ("6.02e23", 6.02e23)],
        *[("-.inf", -math.inf), (".INF", math.inf), ("+.Inf", math.inf)],
        *[("true", True), ("False", False), ("TRUE", True), ("null", None), ("~", None), ("", None)],
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    """Type and value, as a document's only value and on their own."""
    found = load(f"- {text}", "f").value
    assert isinstance(found, list)
    assert (type(found[0].value), found[0].value, found[0].text) == (type(value), value, text)
    assert (type(scalar(text)), scalar(text)) == (type(value), value)


def test_not_a_number_and_overlong_numbers_are_read() -> None:
    """NaN equals nothing, and Python reads no integer of 5000 digits."""
    assert math.isnan(scalar(".nan"))  # type: ignore[arg-type]
    assert scalar("1" * 5000) == math.inf


@pytest.mark.parametrize("text", ["'0123'", '"0123"', "!!str 0123"])
def test_quoted_or_tagged_text_is_a_string(text: str) -> None:
    """Quotes decide against a number."""
    assert load(text, "f").value == "0123"


def test_every_value_and_key_knows_its_place_and_text() -> None:
    """Lines and columns count from 1."""
    root = load("a: 1\nlist:\n  - 0123\n  - 'x y'\n", "job.yaml")
    assert isinstance(root.value, dict)
    assert [(str(key), str(key.place)) for key in root.value] == [("a", "job.yaml:1:1"), ("list", "job.yaml:2:1")]
    items = root.value[Key("list", Place(""))].value
    assert items == [Node(123, "0123", Place("job.yaml", 3, 5)), Node("x y", "x y", Place("job.yaml", 4, 5))]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("a: &x [1, 2]\nb: *x", {"a": [1, 2], "b": [1, 2]}),
        ("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}),
        ("c: {<<: [{p: 1}, {p: 2, r: 3}]}", {"c": {"p": 1, "r": 3}}),
        ("'<<': 1", {"<<": 1}),
        ("1: x\nno: y", {"1": "x", "no": "y"}),
        ("a: |\n  x\n  y\n", {"a": "x\ny\n"}),
        ("%YAML 1.2\n---\na: 1\n", {"a": 1}),
        ("\ufeffa: 1", {"a": 1}),
        ("a: !!int 3\nb: !!map {}", {"a": 3, "b": {}}),
    ],
)
def test_documents_compose(text: str, value: Any) -> None:
    """Aliases, merge keys, block text and directives; keys are strings as written."""
    assert plain(load(text, "f")) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f:3:1: duplicate key 'a', first given on line 1"),
        ("a: 1\n'a': 3", "f:2:1: duplicate key 'a'"),
        ("a: {b: 1, b: 2}", "f:1:11: duplicate key 'b'"),
        ("a: !thing x", "f:1:4: tag !thing is not allowed"),
        ("a: !!python/object/apply:os.system [x]", "f:1:4: tag !!python/object/apply:os.system is not allowed"),
        ("a: !!timestamp 2024-01-01", "f:1:4: tag !!timestamp is not allowed"),
        ("a: !!set {x}", "f:1:4: tag !!set is not allowed"),
        ("a: !!int three", "f:1:4: tag !!int is not allowed here"),
        ("[a]: 1", "f:1:1: expected a word as the key, got a list"),
        ("a: &x [*x]", "f:1:4: this alias refers to itself"),
        ("<<: 1", "f:1:5: expected a mapping, or a list of mappings, after '<<'"),
        ("a:\n\tb: 1", "f:2:1: while scanning for the next token, found character '\\t'"),
        ("a: [1, 2", "f:1:9: while parsing a flow sequence"),
        ("a:\n\tb: 1", "that cannot start any token. Indent YAML with spaces, not tabs"),
        (
            "a: b: c",
            "f:1:5: mapping values are not allowed here. Check the indentation, and quote text that contains ': '",
        ),
        ("a: {run_dir}/out", '. Quote text that begins with a brace, as in "{run_dir}/out"'),
        ("a: [-o, {run_dir}/out]", '. Quote text that begins with a brace, as in "{run_dir}/out"'),
        ("a: {run_dir/*.pt\nb: 1", '. Quote text that begins with a brace, as in "{run_dir}/out"'),
        ('a: "iter (\\d+)"', ". In single quotes, a backslash stands for itself"),
        ("a: *x", "f:1:4: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2", "f:2:1: expected a single document"),
        ("a: 'x", "f:1:6: while scanning a quoted scalar"),
        ("a: 1\nb: x\x07", "f:2:5: the character U+0007 is not allowed in YAML"),
        ("[" * 5000, "f: the YAML is nested too deeply"),
    ],
)
def test_a_mistake_is_refused_with_its_place(text: str, message: str) -> None:
    """``file:line:column: what is wrong``."""
    with pytest.raises(JobDefinitionError) as caught:
        load(text, "f")
    assert message in str(caught.value)


def test_all_mistakes_come_in_one_error_in_order() -> None:
    """Equal keys and tags do not hide each other, and a caller can add its own."""
    mistakes: list[Mistake] = []
    root = load("a: !x 1\nb: 2\nb: 3\n", "f", mistakes)
    assert plain(root) == {"a": None, "b": 2}
    mistakes.append(Mistake(Place("f", 2, 4), "something else"))
    with pytest.raises(JobDefinitionError) as caught:
        raise_mistakes(mistakes)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == ["f:1:4", "f:2:4", "f:3:1"]


@pytest.mark.parametrize(
    ("value", "bare", "text"),
    [
        *[("1e-4", 1e-4, "1e-4"), ("no", "no", "no"), (True, True, "true"), (1, 1, "1"), (0, 0, "0")],
        *[(2.5, 2.5, "2.5"), ("", "", ""), (None, None, ""), ("0123", 123, "0123")],
    ],
)
def test_python_values_become_nodes_as_if_written(value: Any, bare: Any, text: str) -> None:
    """Text from a command line means what it would mean in a file, and keeps its text."""
    node = node_of(value, "command line")
    assert (type(node.value), node.value, node.text, str(node.place)) == (type(bare), bare, text, "command line")


def test_python_lists_and_mappings_become_nodes() -> None:
    """Tuples count as lists."""
    assert plain(node_of({"a": ("x", 1), "b": {"c": None}}, "s")) == {"a": ["x", 1], "b": {"c": None}}
