"""The states in a checkpoint: dtypes of optimizers, memory in blocks, and the memory that is free for a snapshot."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clusterddp
from clusterddp.checkpoint import file_format, host_memory
from clusterddp.checkpoint.host_memory import CGROUP_V1, CGROUP_V2, LARGE, Blocks, free_memory, left_in_cgroups
from clusterddp.checkpoint.packing import pack, unpack
from clusterddp.checkpoint.state_dict import changed_dtypes, load_state, recast_parameters, state_of
from clusterddp.training.warm_start import load

GROUP: Any = SimpleNamespace(rank=0, world_size=1, collective_device=torch.device("cpu"))


class InFloat32(torch.optim.Optimizer):
    """Keeps float32 moments and weights, and more that a cast to bfloat16 would change."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["nested"] = {"weights": [parameter.float().clone()]}
                    state["count"] = torch.tensor(1000)  # bfloat16 has no 1001
                state["moment"].lerp_(parameter.grad.float(), 0.1)
                state["count"] += 1
                parameter.copy_(state["nested"]["weights"][0].sub_(state["moment"], alpha=group["lr"]))


class Cloned(InFloat32):
    """A ``state_dict`` of its own that changes no dtype."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


class Halved(InFloat32):
    """Saves its moments in half precision, and relies on torch's cast."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {number: {**of, "moment": of["moment"].half()} for number, of in found["state"].items()}
        return {**found, "state": state}


class Holder:
    """Not an optimizer of torch, but it holds several."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        self.main, self.more = InFloat32([first]), [InFloat32(others)]
        self.state: dict[Any, Any] = self.main.state
        self.param_groups = self.main.param_groups

    def step(self) -> None:
        self.main.step()
        self.more[0].step()

    def zero_grad(self) -> None:
        for one in (self.main, *self.more):
            one.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"main": self.main.state_dict(), "more": self.more[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.main.load_state_dict(state["main"])
        self.more[0].load_state_dict(state["more"])


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: a subclass of torch's without its attributes."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = InFloat32(parameters)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


def adafactor(parameters: Any) -> Any:
    module = pytest.importorskip("transformers.optimization")
    return module.Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)


def made(kind: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(dtype)
    return model, kind(model.parameters())


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8).to(model.weight.dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(**parts: Any) -> Any:
    """The parts' states, as they are read from a file."""
    plain, tensors = pack({name: state_of(part) for name, part in parts.items()})
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    "kind",
    [InFloat32, Cloned, Holder, torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW, Wrapped, adafactor],
)
def test_an_optimizer_continues_with_the_saved_state(kind: Any) -> None:
    model, optimizer = made(kind)
    train(model, optimizer, range(5))
    states = saved(model=model, optimizer=optimizer)
    resumed, its_optimizer = made(kind)
    load_state(resumed, states["model"])
    load_state(its_optimizer, states["optimizer"])
    assert changed_dtypes(its_optimizer, states["optimizer"]) == []
    (_, one), (_, other) = pack(state_of(optimizer)), pack(state_of(its_optimizer))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    train(model, optimizer, range(5, 15))
    train(resumed, its_optimizer, range(5, 15))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_the_tensors_that_keep_their_dtype_are_copies() -> None:
    """The ranks of a host share the memory from which they load."""
    model, optimizer = made(InFloat32)
    train(model, optimizer, range(2))
    states = saved(optimizer=optimizer)
    load_state(made(InFloat32)[1], states["optimizer"])
    resumed, its_optimizer = made(InFloat32)
    load_state(its_optimizer, states["optimizer"])
    before = copy.deepcopy(states)
    train(resumed, its_optimizer, range(2))
    (_, one), (_, other) = pack(before), pack(states)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_optimizer_that_converts_its_state_itself_is_left_alone() -> None:
    model, optimizer = made(Halved, torch.float32)
    train(model, optimizer, range(2))
    _, its_optimizer = made(Halved, torch.float32)
    load_state(its_optimizer, saved(optimizer=optimizer)["optimizer"])
    assert {state["moment"].dtype for state in its_optimizer.state.values()} == {torch.float32}
    assert changed_dtypes(its_optimizer, state_of(optimizer)) == []


def test_the_state_of_parameters_in_another_dtype_than_before_is_cast(tmp_path: Path) -> None:
    """As in torch: AdamW's step refuses a moment in float32 for a parameter in bfloat16."""
    model, optimizer = made(torch.optim.AdamW, torch.float32)
    train(model, optimizer, range(2))
    states = saved(model=model, optimizer=optimizer)
    torch.save(states, tmp_path / "all.pt")
    with clusterddp.CheckpointFolder(tmp_path / "folder") as folder:
        folder.restore(model=model, optimizer=optimizer)
        folder.save(2, model=model, optimizer=optimizer)
    for how in ("folder", "init_from", "run"):
        now, its_optimizer = made(torch.optim.AdamW)
        parts = {"optimizer": its_optimizer, "model": now}
        if how == "folder":
            with clusterddp.CheckpointFolder(tmp_path / "folder") as folder:
                folder.restore(**parts)
        elif how == "init_from":
            load(dict.fromkeys(parts, tmp_path / "all.pt"), True, parts, GROUP)
        else:
            recast = recast_parameters(parts, states)
            for name, part in parts.items():
                load_state(part, states[name], recast)
        assert {state["exp_avg"].dtype for state in its_optimizer.state.values()} == {torch.bfloat16}
        assert changed_dtypes(now, states["model"]) == ["weight", "bias"]
        train(now, its_optimizer, range(2, 4))


# --- Memory in blocks: which tensors have one alone, and that all bytes are somewhere


SMALL = (0, 100)
FIRST = (100, 100 + LARGE)
SECOND = (FIRST[1], FIRST[1] + LARGE + 1)
SIZE = SECOND[1] + 10


def of(*spans: tuple[int, int]) -> Blocks:
    return Blocks(spans, SIZE, file_format.memory)


def test_a_large_tensor_is_alone_in_its_block_and_a_small_one_is_not() -> None:
    memory = of(SMALL, FIRST, SECOND)
    assert [memory.bytes_of(*span)[1] for span in (SMALL, FIRST, SECOND)] == [False, True, True]
    assert sum(len(view) for view in memory.views(0, SIZE)) == SIZE


def test_only_the_first_to_ask_for_a_block_is_told_that_it_is_alone() -> None:
    memory = of(FIRST)
    assert [memory.bytes_of(*FIRST)[1] for _ in range(2)] == [True, False]


def test_only_the_largest_tensors_have_blocks_where_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have so many mappings."""
    monkeypatch.setattr(host_memory, "MOST", 1)
    memory = of(SMALL, FIRST, SECOND)
    assert [memory.bytes_of(*span)[1] for span in (SMALL, FIRST, SECOND)] == [False, False, True]
    assert len(list(memory.views(0, SIZE))) == 3


# --- The memory that cgroups leave to a rank, from files as the kernel writes them


GIB = 1 << 30
#: In v1, of a cgroup without a limit.
NONE = 9223372036854771712


def version_1(folder: Path, limit: int, used: int, own: int, below: int, swapped: int | None = None) -> None:
    """A cgroup with page cache of its own and of the cgroups ``below`` it. ``swapped``: and with a limit of both."""
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    if swapped is not None:
        (folder / "memory.memsw.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.memsw.usage_in_bytes").write_text(f"{used + swapped}\n")
    lines = [f"cache {own}", f"inactive_file {own // 2}", f"active_file {own - own // 2}"]
    both = own + below
    total = [f"total_cache {both}", f"total_inactive_file {both // 2}", f"total_active_file {both - both // 2}"]
    (folder / "memory.stat").write_text("\n".join([*lines, f"hierarchical_memory_limit {limit}", *total]) + "\n")


def version_2(folder: Path, most: str, used: int, stat: str, high: str = "max") -> None:
    folder.mkdir(parents=True)
    for name, value in (("max", most), ("high", high), ("current", used), ("stat", stat)):
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_in_cgroup_v1_the_page_cache_of_the_tasks_is_free_in_the_job_that_has_the_limit(tmp_path: Path) -> None:
    version_1(tmp_path / "job_7", 200 * GIB, 199 * GIB, 0, 150 * GIB)
    version_1(tmp_path / "job_7" / "step_0", 200 * GIB, 198 * GIB, 0, 150 * GIB)
    version_1(tmp_path / "job_7" / "step_0" / "task_0", NONE, 150 * GIB, 120 * GIB, 0)
    assert left_in_cgroups(tmp_path, "/job_7/step_0/task_0", CGROUP_V1) == 151 * GIB


def test_in_cgroup_v1_what_is_swapped_out_counts_where_swap_is_limited(tmp_path: Path) -> None:
    version_1(tmp_path / "job_7", 200 * GIB, 150 * GIB, 10 * GIB, 0, swapped=45 * GIB)
    assert left_in_cgroups(tmp_path, "/job_7", CGROUP_V1) == 15 * GIB


def test_in_cgroup_v2_the_tightest_group_counts(tmp_path: Path) -> None:
    version_2(tmp_path / "a", "1000000", 400000, "anon 1\ninactive_file 50000")
    version_2(tmp_path / "a" / "b", "max", 300000, "anon 1\ninactive_file 50000")
    assert left_in_cgroups(tmp_path, "/a/b", CGROUP_V2) == 650000


def test_in_cgroup_v2_active_pages_and_the_cache_of_small_files_names_are_free(tmp_path: Path) -> None:
    cached = "anon 100\nactive_file 20000\ninactive_file 10000\nslab_reclaimable 3000\nslab_unreclaimable 500"
    version_2(tmp_path / "a", "100000", 90000, cached)
    assert left_in_cgroups(tmp_path, "/a", CGROUP_V2) == 43000


def test_memory_above_which_the_kernel_slows_every_allocation_is_not_free(tmp_path: Path) -> None:
    version_2(tmp_path / "a", "100000", 40000, "anon 40000", high="50000")
    assert left_in_cgroups(tmp_path, "/a", CGROUP_V2) == 10000


def test_names_of_the_host_that_a_container_hides_do_not_hide_the_containers_limit(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    version_1(root, 8 * GIB, 6 * GIB, 0, 3 * GIB)
    assert left_in_cgroups(root, "/slurm/uid_1/job_7", CGROUP_V1) == 5 * GIB


def test_a_cgroup_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    version_2(tmp_path / "a", "100000", 120000, "anon 120000")
    assert left_in_cgroups(tmp_path, "/a", CGROUP_V2) == 0


def test_this_machine_has_some_free_memory() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
