"""``stacks``, ``save``, ``stop`` and ``requeue`` with real ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.cli.command_line import command
from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.descent import Descent
from tests.histories import check_history
from tests.ranks.test_local import start
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_for_step, wait_until

STEPS = 400
#: Each rank has the same samples, so that the mean over the ranks is exact and one process can check the bits.
SCRIPT = f"""
import sys
import time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.descent import Descent

ctx = clusterddp.init()
model = torch.nn.Linear(1, 1)
torch.nn.init.constant_(model.weight, 0.25)
torch.nn.init.constant_(model.bias, 0.5)
optimizer = Descent(model)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1))
for (x,) in run.steps({STEPS}):
    loss = (model(x) - 3).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    if not Path(sys.argv[1]).exists():
        time.sleep(0.05)  # in slow motion
"""


#: Without clusterddp. As under torchrun, TERM ends it, unless it has a handler, which may exit with code 0.
FOREIGN = """
import signal
import sys
import time
from pathlib import Path

if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("step 0", flush=True)
for _ in range(600):
    if not Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""


@pytest.mark.parametrize("handler", ["none", "handler"])
@pytest.mark.parametrize("order", ["stop", "requeue"])
def test_a_script_without_clusterddp_gets_the_stop_signal_at_the_users_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str, handler: str
) -> None:
    """It had trained to its end, and was then completed."""
    run, end, script = RunDirectory(tmp_path / "run"), tmp_path / "end", tmp_path / "foreign.py"
    script.write_text(FOREIGN)
    process = start(run, str(script), "--device", "cpu", "--gpus", "2", "--", str(end), handler)
    began = lambda attempt: any("step 0" in log.read_text() for log in run.attempt_logs(attempt).glob("rank-1.out"))  # noqa: E731
    wait_until(lambda: began(0), "the first step")
    try:
        assert command([order, str(run)]) == 0, story(run)
        said = capsys.readouterr().out
        assert ("held" if order == "stop" else "requeued") in said
        if order == "requeue":
            wait_until(lambda: began(1), "attempt 1")
    finally:
        end.touch()
    # A second attempt that ends at once may be unconfirmed: its steps cannot be seen, only its time.
    assert process.wait(timeout=30) in ((130,) if order == "stop" else (0, UNCONFIRMED))
    assert (outcome_of(run) or {}).get("state") == (None if order == "stop" else "completed"), story(run)
    assert {event["event"] for event in run.events()}.isdisjoint({"rank_failed", "restarted"})


def undisturbed_losses() -> list[float]:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.25)
    torch.nn.init.constant_(model.bias, 0.5)
    optimizer = Descent(model)
    losses = []
    for _ in range(STEPS):
        loss = (model(torch.ones(1, 1)) - 3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.product  # slurm/test_steering.py does the same from a login node
def test_a_run_shows_its_stacks_saves_is_requeued_is_stopped_and_continues_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its user's commands alone. Each returns when it is carried out; no step is lost or repeated."""
    run, fast, script = RunDirectory(tmp_path / "run"), tmp_path / "fast", tmp_path / "slow.py"
    script.write_text(SCRIPT)
    process = start(run, str(script), "--device", "cpu", "--gpus", "2", "--", str(fast))
    wait_for_step(run, 2)

    assert command(["stacks", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "slow.py:" in shown and "\n  MainThread, most recent call first\n    " in shown
    # The main thread may be in the loader; threads that wait for signals and orders are left out.
    assert "clusterddp/worker" not in shown and "clusterddp/training/agreement" not in shown

    assert command(["save", str(run)]) == 0
    saved = int(capsys.readouterr().out.split()[1])
    assert (run.checkpoints / f"step-{saved:012d}.attempt-0.safetensors").exists()

    assert command(["requeue", str(run)]) == 0, story(run)
    assert "is saved. The job is requeued" in capsys.readouterr().out
    wait_until(
        lambda: any(line["attempt"] == 1 for line in read_lines(run.metrics_file)), "the first step of attempt 1"
    )

    assert command(["stop", str(run)]) == 0, story(run)
    assert process.wait(timeout=30) == 130
    assert run.outcome() is None and run.attempts() == [0, 1]

    fast.touch()
    _, said = start(run).communicate(timeout=120)
    assert (outcome_of(run) or {}).get("state") == "completed", said
    lines = list(read_lines(run.metrics_file))
    assert [line["step"] for line in lines] == list(range(STEPS)), story(run)
    assert [line["loss"] for line in lines] == undisturbed_losses()
    check_history(run.events())
