"""Knows nothing of clusterddp: continues from its own file, and logs to W&B and MLflow with their usual calls.

``own_trackers.py OUT KILLED``: in attempts below KILLED, rank 0 is killed when it has logged 3 steps more. No torch.
"""

import json
import os
import signal
import sys
from pathlib import Path

import wandb

out, killed = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
if rank == 0:
    import mlflow
own = out / f"rank-{rank}.json"
step = json.loads(own.read_text())["step"] if own.exists() else 0
used = {name: os.environ.get(name) for name in ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")}
run = wandb.init(project="own", dir=out, mode="offline", settings=wandb.Settings(silent=True, console="off"))
if rank == 0:
    mlflow.set_experiment("own")
    mlflow.start_run(run_name="training")
for step in range(step, step + 3):  # noqa: B020
    run.log({"loss": 1 / (1 + step)}, step=step)
    if rank == 0:
        mlflow.log_metric("loss", 1 / (1 + step), step=step)
used |= {"wandb": run.id, "mlflow": mlflow.active_run().info.run_id if rank == 0 else None}
with open(out / f"used-{rank}.jsonl", "a") as file:
    print(json.dumps(used), file=file)
own.write_text(json.dumps({"step": step + 1}))
if rank == 0 and int(os.environ["CLUSTERDDP_ATTEMPT"]) < killed:
    os.kill(os.getpid(), signal.SIGKILL)
