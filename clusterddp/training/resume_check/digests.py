"""Texts that are equal for equal contents, of batches, logged values and states."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from clusterddp.checkpoint.generators import with_state
from clusterddp.checkpoint.state import bits_of, pack, state_of

#: Plain values whose text is at most so long are shown as they are.
_SHORT = 60
#: A larger tensor of a GPU is summed up there, so many elements at a time, rather than copied.
_COPIED_BYTES, _SUMMED = 1 << 16, 1 << 22
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def of_batch(batch: Any) -> dict[str, str]:
    """The digest of each entry of a batch by its place in it, such as ``[0]`` or ``['labels']``; else of all of it."""
    if isinstance(batch, Mapping):
        return {f"[{key!r}]": of_value(entry) for key, entry in batch.items()}
    if isinstance(batch, (list, tuple)):
        return {f"[{number}]": of_value(entry) for number, entry in enumerate(batch)}
    return {"": of_value(batch)}


def of_part(part: Any) -> dict[str, str]:
    """The digests of a part's state by the names in it. Raises what the part's ``state_dict()`` raises."""
    state = state_of(with_state(part))
    try:
        plain, tensors = pack(state)
    except Exception:  # a state that could not be saved, of an object that is no part
        return {name: of_value(value) for name, value in state.items()}
    found = {name: of_value(tensor) for name, tensor in tensors.items()}
    return found | {name: of_value(value) for name, value in _leaves(plain, "")}


def of_value(value: Any) -> str:
    """The value itself if it is a short plain one, else a hash of its content."""
    if isinstance(value, _PLAIN) and len(text := repr(value)) <= _SHORT:
        return text
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.layout is torch.strided:
        return f"{value.detach().reshape(()).item()!r}"
    content = hashlib.blake2b(digest_size=12)
    for piece in _content(value):
        content.update(piece)
    return f"#{content.hexdigest()}"


def _leaves(plain: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values in the JSON form of a state by their path; tensors are elsewhere."""
    if isinstance(plain, dict) and "$tensor" not in plain:
        for key, value in plain.items():
            yield from _leaves(value, path if key.startswith("$") else f"{path}.{key}" if path else key)
    elif isinstance(plain, list):
        for number, value in enumerate(plain):
            yield from _leaves(value, f"{path}[{number}]")
    elif not isinstance(plain, dict):
        yield path, plain


def _content(value: Any) -> Iterator[bytes]:
    """The content of a value as bytes, with the types of all that it consists of."""
    yield f"{type(value).__qualname__}(".encode()
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value.detach())
    elif isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, (set, frozenset)):
        yield from sorted(of_value(entry).encode() for entry in value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _content(key)
            yield from _content(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _content(entry)
    else:
        yield from _of_object(value)
    yield b")"


def _of_object(value: Any) -> Iterable[bytes]:
    """An object of a class of the script's or a library's own: its attributes, or what a worker would send."""
    if attributes := getattr(value, "__dict__", None):
        return _content(dict(attributes))
    try:
        return [pickle.dumps(value)]
    except Exception:  # nothing more is known of it
        return []


@torch.no_grad()
def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    bits = bits_of(tensor)
    if tensor.device.type == "cpu" or bits.nbytes <= _COPIED_BYTES:
        yield bits.cpu().numpy().tobytes()
        return
    yield str(_summed(bits)).encode()


def _summed(bits: torch.Tensor) -> int:
    """A sum over a tensor of integers, on its device: another one for another element, and most likely for others."""
    total = 0
    pieces: tuple[torch.Tensor, ...] = torch.split(bits.flatten(), _SUMMED)
    for piece in pieces:
        # Odd factors, so that no single bit is lost, that differ from place to place.
        places = torch.arange(1, 2 * piece.numel(), 2, device=piece.device, dtype=torch.int64)
        total = hash((total, (piece.to(torch.int64) * places).sum().item()))
    return total
