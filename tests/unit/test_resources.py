"""What submit checks of the cluster and of the program before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.slurm import batch
from clusterddp.slurm.batch import check_gpus, check_micro, check_nodes, fit_to_cluster, share_of_node
from clusterddp.slurm.commands import NodeShape, parse_node_sizes
from clusterddp.slurm.configuration import Preemption

NODES = [NodeShape(32, 64000, {"a100": 4}), NodeShape(32, 64000, {"a100": 4}), NodeShape(8, 8000, {})]


def job(script: Path | None = None, **values: object) -> Job:
    named = {"name": "x", "script": str(script) if script else None, "gpus_per_node": 4}
    return Job(**{**named, **values})  # type: ignore[arg-type]


def test_of_a_range_the_fewest_nodes_must_be_there() -> None:
    """Slurm adds what it has of the rest."""
    check_nodes(job(nodes=9, min_nodes=3), NODES)
    with pytest.raises(UsageError, match="has 3 nodes, fewer than --nodes 4-9"):
        check_nodes(job(nodes=9, min_nodes=4), NODES)
    check_gpus(job(nodes=9, min_nodes=2), NODES)
    with pytest.raises(UsageError, match="has 2 nodes with at least 4 GPUs .* but the job requests 3-9 of them"):
        check_gpus(job(nodes=9, min_nodes=3), NODES)
    with pytest.raises(UsageError, match="has 0 nodes with at least 5 GPUs .* but the job requests 1 of them"):
        check_gpus(job(gpus_per_node=5), NODES)
    fitted, _ = share_of_node(job(nodes=9, min_nodes=2), NODES)
    assert (fitted.cpus_per_task, fitted.mem, fitted.nodes_text) == (8, "64000M", "2-9")


def test_a_rank_with_several_gpus_gets_the_cpus_that_go_with_all_of_them() -> None:
    """The node's share is the same, in half as many tasks."""
    fitted, _ = share_of_node(job(gpus_per_rank=2), NODES)
    assert (fitted.cpus_per_task, fitted.mem) == (16, "64000M")


def test_the_remark_names_only_what_the_user_has_not_requested() -> None:
    assert share_of_node(job(gpus_per_node=1), [NodeShape(1, 8000, {"": 1})])[1] == [
        "requesting 1 CPU per rank and 8000M of memory per node, in proportion to the GPUs"
    ]
    remark = ["requesting 8 CPUs per rank, in proportion to the GPUs"]
    assert share_of_node(job(sbatch={"mem-per-cpu": "2G"}), NODES)[1] == remark
    assert share_of_node(job(cpus_per_task=2, mem="9G"), NODES)[1] == []


def test_what_is_reserved_on_a_node_is_not_for_jobs() -> None:
    """Releases before 22.05 print no CPUEfctv; CoreSpecCount counts cores."""
    size = "RealMemory=9000 CoreSpecCount=1 MemSpecLimit=1000 ThreadsPerCore=2"
    old, new = f"NodeName=old CPUTot=8 {size} Reason=a CPUTot=1\nb\n", f"NodeName=new-1 CPUEfctv=6 CPUTot=8 {size}\n"
    assert parse_node_sizes(old + new) == {"old": (6, 8000), "new-1": (6, 8000)}


CALLS = "for batch in run.steps(9):\n    for micro in run.micro(batch): pass\n"
IMPORTS = ["import loop", "from loop import fit", "import inner.loop", "from inner import loop", "from . import loop"]


def test_a_range_needs_a_script_that_takes_pieces(tmp_path: Path) -> None:
    """One sentence that says what to write; a word in a comment, or an attribute, is no call."""
    script = tmp_path / "train.py"
    script.write_text("# run.micro(batch)\nmicro = print\nmicro(run.micro)\n")
    assert check_micro(job(script, nodes=2)) == []
    with pytest.raises(UsageError, match=r"--nodes 1-2: .*train.py never calls run.micro\(\).* Put `for micro in run"):
        check_micro(job(script, nodes=2, min_nodes=1))
    script.write_text(CALLS)
    assert check_micro(job(script, nodes=2, min_nodes=1)) == []
    script.write_text("if x = 1: pass\n")
    with pytest.raises(UsageError, match=r"train.py:1: "):
        check_micro(job(script, nodes=2, min_nodes=1))


@pytest.mark.parametrize("line", IMPORTS)
def test_the_call_may_be_in_a_file_that_the_script_imports(tmp_path: Path, line: str) -> None:
    """Next to it, or in a package there; files that import each other are read once."""
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "loop.py").write_text(f"import train\n{CALLS}")
    (tmp_path / "train.py").write_text(f"import torch, os.path\nfrom nowhere import x\n{line}\n")
    assert check_micro(job(tmp_path / "train.py", nodes=2, min_nodes=1)) == []


def test_a_module_is_looked_for_where_it_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed module elsewhere is not checked, and a message says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text(CALLS)
    (tmp_path / "pkg" / "plain.py").write_text("import torch\n")
    assert check_micro(job(module="pkg", nodes=2, min_nodes=1)) == []
    with pytest.raises(UsageError, match=r"pkg/plain.py never calls run.micro\(\)"):
        check_micro(job(module="pkg.plain", nodes=2, min_nodes=1))
    assert "clusterddp did not check" in check_micro(job(module="installed.train", nodes=2, min_nodes=1))[0]


@pytest.mark.parametrize("allowed", [True, False])
def test_an_expedited_requeue_is_requested_only_where_the_site_allows_it(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """sbatch refuses it elsewhere."""
    policy = Preemption("low", "REQUEUE", 20, 30, 121, expedites=allowed)
    monkeypatch.setattr(batch.slurm, "require", lambda *_: None)
    monkeypatch.setattr(batch.slurm, "partition_nodes", lambda _: NODES)
    monkeypatch.setattr(batch, "preemption", lambda *_: policy)
    fitted, remarks = fit_to_cluster(job(device="cpu", expedite_requeue=True), required=True)
    assert fitted.expedite_requeue is allowed
    assert any("this cluster does not allow it" in remark for remark in remarks) is not allowed
    assert ("held for 121 s" in remarks[-1]) is not allowed
