"""The memory that cgroups leave to a rank, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from clusterddp.checkpoint.state_dict import CGROUP_V1, CGROUP_V2, free_memory, left_in_cgroups

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
