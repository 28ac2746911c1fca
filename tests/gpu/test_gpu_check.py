"""``python -m benchmarks.gpu_check``: its cases work on a stand-in, and only a GPU's results count as measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import rows
from benchmarks.gpu_check import __main__ as command_line
from benchmarks.gpu_check import costs, session, training
from benchmarks.gpu_check.case import REPOSITORY, SMALL, Case, Lab, Result, Sizes, Speeds, carry_out
from benchmarks.gpu_check.plan import ASSUMED, cases
from clusterddp.jobdef.job import Keep
from tests.checkpoint_files import save
from tests.runs_on_disk import recorded_run, started

FACTS = {"gpu": "NVIDIA H100", "gpus": 1, "cuda": "13.0", "nccl": "2.28", "torch": "2.11", "speeds": {"start_s": 1.0}}
SPEEDS = Speeds(start_s=1.0, copy=10.0, fill=1.0, disk=1.0)


def test_the_first_cases_pass_on_a_stand_in(tmp_path: Path) -> None:
    """Their results are marked, and give no rows. Another call has what is left."""
    out = tmp_path / "out.json"
    asked = ["--stand-in", "--out", out, "--folder", tmp_path / "runs", "--only", "wrap", "graph"]
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, asked)]

    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph: not run: the stand-in has no CUDA graphs" in done.stdout
    found = json.loads(out.read_text())
    states = {name: result["state"] for name, result in found["cases"].items()}
    assert states == {"wrap": "passed", "graph": "not run"}
    assert {(result["on"], result["counts"]) for result in found["cases"].values()} == {("stand-in", False)}
    assert "steps=100" in found["cases"]["wrap"]["reduced"] and found["rows"] == []
    assert "| wrap | passed (reduced: " in out.with_suffix(".md").read_text()
    options = command_line.parser().parse_args(["--only", "wrap", "graph"])
    assert [case.name for case in session.left(options, found["cases"], 1)] == ["graph"]


#: One case that is endless, and one that is not begun.
ENDLESS = """
import json, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_check import session
from benchmarks.gpu_check.case import Case, Sizes, Speeds
from clusterddp.process import adopt_orphans

def act(lab):
    subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > ../pid; echo began > run.log; wait"], cwd=lab.folder)

adopt_orphans()
facts, speeds = {"gpu": "NVIDIA H100"}, Speeds(0, 1, 1, 1)
made = session.Session(facts, speeds, Sizes(), 1, "inductor", Path(sys.argv[1]), time.monotonic() + 3)
found = [session.attempt(Case("endless", "", act, 0, work_s), made).as_json() for work_s in (1, 60)]
Path(sys.argv[1], "found.json").write_text(json.dumps(found))
"""


def test_a_case_is_killed_when_the_budget_is_over_with_all_it_has_started(tmp_path: Path) -> None:
    """Also a process with a session of its own, as a run's supervisor has. The case has no result then."""
    subprocess.run([sys.executable, "-c", ENDLESS, tmp_path], cwd=REPOSITORY, check=True)
    cut, left = json.loads((tmp_path / "found.json").read_text())
    assert cut["state"] == "not run" and "when the budget was over" in cut["words"] and "began" in cut["story"]
    assert left["state"] == "not run" and "it needs about 60 s" in left["words"]
    assert not cut["counts"] and cut["on"] == "NVIDIA H100"
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


# ---- without a process


def lab_of(path: Path, stand_in: bool = False) -> Lab:
    return Lab(SMALL, 1, stand_in, path, path, "inductor")


def test_a_checkpoint_that_is_not_the_state_of_its_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is copied too late."""
    weights = {step: torch.full((3,), float(step)) for step in (6, 12, 18)}
    lines = [{"step": step, "time": 1.0, "attempt": 0, "cycle_s": 0.1, "digest": 0} for step in range(18)]
    run = recorded_run(tmp_path / "run", [started(0)])
    for step, weight in weights.items():
        lines[step - 1]["digest"] = int(weight.view(torch.int32).sum(dtype=torch.int64))
        save(run, 0, step, {"model": {"w": weight, "running_mean": torch.ones(1)}}, keep=Keep(9))
    monkeypatch.setattr(Lab, "train", lambda *_, **__: run)

    def result() -> Result:
        run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return carry_out(Case("snapshot", "", training.snapshot), lab_of(tmp_path))

    assert result().state == "passed", result().words
    lines[11]["digest"] += 1
    assert (result().state, result().words) == ("failed", "checkpoint 12 is not the state after 12 steps")


@pytest.mark.parametrize(("slower", "missed"), [(1.0, []), (1.2, ["step (cuda, 1 ranks): loop"])])
def test_the_costs_are_rows_beside_the_least_that_does_the_same(slower: float, missed: list[str]) -> None:
    """What is queued within half a millisecond more than torch's own copies meets its bar."""
    pair = {"ours": [0.0006] * 4, "pinned": [0.0002] * 4}
    found = {"step": {"ours": [0.01 * slower] * 4, "DDP": [0.01] * 4, "bare": [0.008] * 4}, "stall": pair}
    found["copies"] = {"ours": [0.1] * 4, "pinned": [0.1] * 4}
    made = costs.cost_rows(found, "cuda, 1 ranks", 256)
    assert [row.row for row in made if row.met is False] == missed
    assert [row.allowed for row in made] == [1.02, None, pytest.approx(3.5), 1.05]


def test_only_full_sizes_on_a_gpu_count(tmp_path: Path) -> None:
    """The rows of a case with another size stay with the case; another device's file is not continued."""
    out, results = tmp_path / "out.json", {}
    row = rows.counted("save: stall", "s", 1.0, 2.0, "torch.save").as_json()
    for name, asked in (("full", []), ("small", ["state_gb=5"])):
        sizes = session.sized(Sizes(), asked)
        made = session.Session(FACTS, SPEEDS, sizes, 1, "inductor", tmp_path, 0.0)
        result = Result(name, "passed", "fine", {"rows": [{**row, "row": name}]})
        results[name] = session.described(result, made, 60.0).as_json()
    assert (results["full"]["counts"], results["small"]["counts"]) == (True, False)
    session.keep(out, made, results)
    record = json.loads(out.read_text())
    assert [row["row"] for row in record["rows"]] == ["full"]
    assert session.kept(out, made) == results
    text = session.page(record)
    assert "| small | passed (reduced: state_gb=5) | fine |" in text and "Not yet run" not in text
    other = session.Session({**FACTS, "gpu": session.STAND_IN}, SPEEDS, SMALL, 1, "inductor", tmp_path, 0.0)
    with pytest.raises(SystemExit, match="has results of NVIDIA H100, and this is stand-in"):
        session.kept(out, other)


def test_a_bound_follows_from_what_was_measured() -> None:
    """A slow disk gives the case that writes most of it more time, and the others none."""
    slow = Speeds(ASSUMED.start_s, ASSUMED.copy, ASSUMED.fill, ASSUMED.disk / 2)
    more = {case.name: case.bound_s(slow, Sizes()) - case.bound_s(ASSUMED, Sizes()) for case in cases(1)}
    assert more["large-state"] == pytest.approx(3 * 60) and more["wrap"] == 0
    names = [case.name for case in cases(4)]
    assert names[:3] == ["start-1", "start-2", "start-4"] and len(set(names)) == len(names)


def test_wheels_of_what_is_missing_are_installed_for_the_call(tmp_path: Path) -> None:
    """A wheel of something that is here, such as numpy, must not replace it."""
    for name in ("absent_package", "numpy"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            facts = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{facts}/RECORD", "")
    target = tmp_path / "target"
    command_line.install(tmp_path, str(target))
    assert (target / "absent_package.py").exists() and not (target / "numpy.py").exists()
    with pytest.raises(SystemExit, match="no .whl file"):
        command_line.install(target, str(target))


def test_without_a_gpu_it_says_what_to_do() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", "wrap"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "(without one: --stand-in)" in done.stderr and "no GPU is visible" in done.stderr
