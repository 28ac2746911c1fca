"""Which values are secret, and how they are masked in text and in lists of arguments.

The name decides whether a value is secret: ``HF_TOKEN`` in ``env:``, ``--api-key`` in the arguments.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import urllib.parse
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

MASK = "***"

_ANYWHERE = {"secret", "password", "passwd", "passphrase"}
_LAST = {"token", "key", "apikey", "credential", "credentials", "pwd"}
#: Of these, such as a column's name or a word of a vocabulary, a key or a token is no secret.
_OF_DATA = frozenset("text image label sort partition eos bos pad mask unk sep cls".split())
#: A name that ends in one of these (a file, a path) is not secret.
_PLACES = {"file", "path", "dir", "id", "name"}
#: Shorter values are not masked in text, because they would match everywhere, and neither are shorter single words.
_SHORTEST, _LONGEST_WORD = 6, 15


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name has a secret value: WANDB_API_KEY, --hf-token, db.password."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())
    if words == ["pwd"]:  # the shell's current folder
        return False
    of_data = words[-1:] in (["key"], ["token"]) and bool(_OF_DATA & set(words[-2:-1]))
    last = bool(_LAST & set(words[-1:])) and not of_data
    return bool(words) and words[-1] not in _PLACES and (last or bool(_ANYWHERE & set(words)))


def known_secrets(environ: Mapping[str, str], *arguments: Sequence[str]) -> list[str]:
    """The secrets in an environment and in lists of arguments, the longest first."""
    found = {value for name, value in environ.items() if is_secret(name)}
    for words in arguments:
        found |= {words[index][len(text) - len(MASK) :] for index, text in masked_arguments(words).items()}
    return sorted((value for value in found if len(value) >= _SHORTEST and not _is_word(value)), key=len, reverse=True)


def _is_word(value: str) -> bool:
    """Whether a value may be a word of other messages, such as ``training``."""
    return len(value) <= _LONGEST_WORD and value.isalpha() and (value[1:].islower() or value.isupper())


def masked(text: str, secrets: Iterable[str]) -> str:
    """Masks these values in a text: verbatim, as repr or JSON write them, URL-encoded and in base64.

    Values that are wrapped over two lines are found, and so are the single lines of a value of several lines.
    """
    if not text or not (forms := _forms(tuple(secrets))):
        return text
    plain = _unbroken(text)
    spans = []
    for form in forms:
        start = plain.find(form)
        while start >= 0:
            spans.append((start, start + len(form)))
            start = plain.find(form, start + 1)
    if not spans:
        return text
    shown, at, end, place = [], 0, 0, _places(text)
    for start, stop in sorted(spans):
        if start >= end:  # else it overlaps the span before
            shown += [text[at : place(start)], MASK]
        end = max(end, stop)
        at = place(end - 1) + 1
    return "".join([*shown, text[at:]])


_BREAK = re.compile(r"\s*\n[\s|]*|\s+")


def _unbroken(text: str) -> str:
    """The text without white space, line breaks and a box's border."""
    return _BREAK.sub("", text)


def _places(text: str) -> Callable[[int], int]:
    """The position in the text of each character of ``_unbroken(text)``. A text may be large, so that only those of its
    words are kept."""
    unbroken, original, left_out = array("q", [0]), array("q", [0]), 0
    for found in _BREAK.finditer(text):
        left_out += found.end() - found.start()
        unbroken.append(found.end() - left_out)
        original.append(found.end())

    def place(index: int) -> int:
        word = bisect_right(unbroken, index) - 1
        return original[word] + index - unbroken[word]

    return place


@functools.lru_cache(maxsize=8)
def _forms(secrets: tuple[str, ...]) -> list[str]:
    """All forms of the secrets that ``masked`` searches for, the longest first."""
    found: set[str] = set()
    for value in {piece for secret in secrets for piece in (secret, *map(str.strip, secret.splitlines()))}:
        once = _quoted(value)
        twice = {form for other in once for form in _quoted(other)}  # a repr in a repr, or in JSON
        found |= {value} | once | twice | _url_encoded(value) | _base64(value)
    unbroken = {_unbroken(form) for form in found}
    return sorted((form for form in unbroken if len(form) >= _SHORTEST), key=len, reverse=True)


def _quoted(value: str) -> set[str]:
    """The value as repr, ascii, repr of its bytes and JSON write it inside a longer quoted text."""
    forms = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    pieces = value.split("'")
    for quote in (repr, ascii, lambda piece: repr(_bytes(piece))[1:]):
        written = [quote(piece)[1:-1] for piece in pieces]
        forms |= {"'".join(written), "\\'".join(written)}
    return forms


def _url_encoded(value: str) -> set[str]:
    data = _bytes(value)
    forms = {urllib.parse.quote(data), urllib.parse.quote(data, safe=""), urllib.parse.quote_plus(data)}
    return forms | {re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), form) for form in forms}


def _base64(value: str) -> set[str]:
    """The base64 characters that depend on the value alone, for each alignment to groups of three bytes."""
    data, forms = _bytes(value), set()
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + data).decode()
        form = encoded[(8 * before + 5) // 6 : 8 * (before + len(data)) // 6]
        forms |= {form, form.replace("+", "-").replace("/", "_")}
    return forms


def _bytes(value: str) -> bytes:
    return value.encode(errors="surrogatepass")


def masked_arguments(words: Sequence[str]) -> dict[int, str]:
    """The arguments with a secret, masked, by index: of ``--api-key=X``, ``--api-key X``, ``key=X``."""
    found: dict[int, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and value and is_secret(name) and re.fullmatch(r"[\w.+~/-]+", name):
            found[index] = f"{name}={MASK}"
        elif index and word and not word.startswith("-"):
            option = words[index - 1]
            if option.startswith("-") and "=" not in option and is_secret(option):
                found[index] = MASK
    return found
