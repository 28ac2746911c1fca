"""How `make gpu-surface` finds the names of torch that clusterddp uses, and what it says of missing ones."""

from __future__ import annotations

from pathlib import Path

from tests.versions.gpu_surface import INSTEAD, Uses, rows, used

MODULE = """
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

class Clock:
    def __init__(self, device: torch.device, store: Store) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._runtime = runtime()

    def passed(self, marks: list[torch.cuda.Event | None]) -> bool:
        marks.append(None)
        return all(mark is None or mark.query() for mark in marks) and self._stream.query()

def runtime():
    return torch.cuda.cudart()

def pinned() -> None:
    runtime().cudaHostRegister(0, 0, 0)
    properties = torch.cuda.get_device_properties(0)
    if hasattr(properties, "uuid") or hasattr(dist.ProcessGroup, "set_timeout"):
        dist.barrier()
"""


def test_names_are_found_behind_aliases_and_on_instances(tmp_path: Path) -> None:
    """Also those that are asked for by hasattr."""
    module = tmp_path / "module.py"
    module.write_text(MODULE)
    uses = Uses(module)
    assert uses.found == {
        *("torch.cuda.current_stream", "torch.cuda.Event", "torch.cuda.cudart", "torch.cuda.get_device_properties"),
        *("torch._C._distributed_c10d.Store", "torch.distributed.barrier", "torch.distributed.ProcessGroup"),
        "torch.distributed.ProcessGroup.set_timeout",
    }
    assert uses.members == {
        *("torch.cuda.Event.append", "torch.cuda.Event.query", "torch.cuda.Stream.query"),
        *("torch._C._cudart.cudaHostRegister", "torch._C._CudaDeviceProperties.uuid"),
    }
    assert uses.asked == {"uuid", "set_timeout"}


def test_a_missing_name_counts_as_handled_if_clusterddp_asks_for_it() -> None:
    """What no release has was no member of an event, but of a list of them."""
    uuid, query, append = "torch._C._CudaDeviceProperties.uuid", "torch.cuda.Event.query", "torch.cuda.Event.append"
    where = {uuid: ["a.py"], query: ["a.py"], append: ["a.py"]}
    found = {"2.4.1": {"missing": [uuid, append]}, "2.9.1": {"missing": [append]}}
    (first, second) = rows(where, found, {uuid, query, append}, {"uuid"})
    assert first == {"name": uuid, "used_in": ["a.py"], "missing": ["2.4.1"], "instead": INSTEAD[uuid]}
    assert (second["name"], second["missing"], second["instead"]) == (query, [], None)
    assert rows(where, found, {append}, set())[0]["instead"] is None


def test_every_name_of_the_page_is_still_used() -> None:
    """Those for which clusterddp does something else where they are missing."""
    where, _, asked = used()
    assert [name for name in INSTEAD if name not in where or name.rpartition(".")[2] not in asked] == []
