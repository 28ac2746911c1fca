"""What cannot work is refused by ``submit``, before it waits in a queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.submission import check
from tests.checkpoint_files import save


def job(script: Path, **values: object) -> Job:
    return Job("net", script=str(script), device="cpu", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "python", "refused"),
    [
        ("if True\n    pass\n", None, True),
        ("def f():\n\tpass\n        pass\n", None, True),
        ("print('a\x00b')\n", None, True),
        ("# coding: latin-1\nx = '\xe4'\n", None, False),
        ("raise RuntimeError('not run')\n", None, False),
        ("if True\n    pass\n", "/opt/python/bin/python", False),  # whose syntax may be newer
    ],
)
def test_a_script_with_a_syntax_error_is_refused(tmp_path: Path, text: str, python: str | None, refused: bool) -> None:
    """It is compiled, not run."""
    script = tmp_path / "train.py"
    script.write_bytes(text.encode("latin-1"))
    if not refused:
        assert check(job(script, python=python), None, place="--local") == []
        return
    with pytest.raises(JobDefinitionError) as raised:
        check(job(script, python=python), None, place="--local")
    assert str(script) in str(raised.value)


@pytest.mark.parametrize(
    ("file", "module"), [("train.py", "train"), ("net/train.py", "net.train"), ("net/__main__.py", "net")]
)
def test_a_module_with_a_syntax_error_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, module: str
) -> None:
    """Its packages are not imported. One that is elsewhere is left to the ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").write_text("raise RuntimeError('not run')\n")
    (tmp_path / file).write_text("if True\n    pass\n")
    with pytest.raises(JobDefinitionError) as raised:
        check(Job("net", module=module, device="cpu"), None, place="--local")
    assert f"{file}:1" in str(raised.value)
    assert check(Job("net", module="json.tool", device="cpu"), None, place="--local") == []


@pytest.mark.parametrize(
    ("changed", "refused"),
    [({"global_batch": 64}, True), ({"global_batch": 8}, False), ({"seed": 2}, True), ({"seed": 1}, False)],
)
def test_a_global_batch_that_differs_from_the_newest_checkpoints_is_refused(
    run: RunDirectory, tmp_path: Path, changed: dict[str, int], refused: bool
) -> None:
    """Also if the run was started without the key."""
    (script := tmp_path / "train.py").write_text("")
    run.create()
    run.job_file.write_text(f"script: {script}\ndevice: cpu\ngpus_per_node: 2\n")
    save(run, 0, 5, {"progress": {"global_batch": 8, "seed": 1}, "model": {"weight": torch.ones(2)}})
    continued = job(script, gpus_per_node=2, **changed)
    if refused:
        with pytest.raises(RunDirectoryError):
            check(continued, str(run), change=True, place="--local")
    else:
        assert check(continued, str(run), change=True, place="--local") is not None


def test_a_number_of_ranks_that_cannot_share_the_runs_global_batch_is_refused(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Of the newest checkpoint."""
    (script := tmp_path / "train.py").write_text("")
    run.create()
    run.job_file.write_text(f"script: {script}\ndevice: cpu\ngpus_per_node: 2\n")
    save(run, 0, 5, {"progress": {"global_batch": 8, "seed": 1}, "model": {"weight": torch.ones(2)}})
    with pytest.raises(RunDirectoryError):
        check(job(script, gpus_per_node=3), str(run), change=True, place="--local")
