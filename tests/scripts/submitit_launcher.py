"""Two launchers as public repositories write them for submitit, which know nothing of clusterddp.

``submitit_launcher.py files|folder JOB_DIR [OPTION...]`` prints the job id and, with ``--wait``, each task's result.
``files``, as MAE and DeiT: the ranks meet in a file that is new for each start, and ``checkpoint()`` names the file to
resume from. ``folder``, as DINOv2: the training finds its newest checkpoint in its output folder, which is named by the
job id.
"""

import argparse
import json
import os
import time
import uuid
from pathlib import Path

import submitit


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("style", choices=["files", "folder"])
    parser.add_argument("job_dir")
    parser.add_argument("--nodes", default=1, type=int)
    parser.add_argument("--ngpus", default=2, type=int, help="ranks per node")
    parser.add_argument("--epochs", default=6, type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--partition", default=None)
    parser.add_argument("--disturbed", default=2, type=int, help="how many attempts wait for a disturbance")
    parser.add_argument("--wait", action="store_true")
    return parser.parse_args()


def get_init_file(args):
    shared = Path(args.job_dir).parent
    return shared / f"{uuid.uuid4().hex}_init"


def waits_here(args, epoch):
    """Attempt 0 stays in epoch 2 until it is disturbed, attempt 1 in epoch 4."""
    attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
    if attempt < args.disturbed and epoch == 2 + 2 * attempt:
        (Path(args.output_dir) / f"here-{attempt}-{os.environ['RANK']}-{os.getpid()}").touch()
        time.sleep(600)


def all_reduce(args, name, value):
    """The sum over ranks, by way of files beside the one that the ranks meet in; a file that was used before is an
    error, as for torch's ``init_method="file://..."``."""
    meeting = args.dist_url.removeprefix("file://")
    own = Path(f"{meeting}-{name}-{args.rank}")
    if own.exists():
        raise RuntimeError(f"{meeting} was used before")
    own.with_suffix(".part").write_text(str(value))
    own.with_suffix(".part").rename(own)
    paths = [Path(f"{meeting}-{name}-{rank}") for rank in range(args.world_size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    return sum(float(path.read_text()) for path in paths)


def train_files(args):
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    checkpoint = Path(args.output_dir) / "checkpoint.pth"
    weight, begin = 0.0, 0
    all_reduce(args, "barrier", 0)
    if args.resume:
        begin, weight = json.loads(Path(args.resume).read_text())
        print(f"Resume checkpoint {args.resume}")
    for epoch in range(begin, args.epochs):
        gradient = all_reduce(args, epoch, args.rank + 1 + epoch)
        waits_here(args, epoch)
        weight = 0.5 * weight + gradient
        if args.rank == 0:
            checkpoint.with_suffix(".part").write_text(json.dumps([epoch + 1, weight]))
            checkpoint.with_suffix(".part").rename(checkpoint)
    return begin, weight


def train_folder(args):
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    saved = sorted(output.glob("model_*.json"))
    begin, weight = json.loads(saved[-1].read_text()) if saved else (0, 0.0)
    for epoch in range(begin, args.epochs):
        waits_here(args, epoch)
        weight = 0.5 * weight + epoch
        if int(os.environ["RANK"]) == 0:
            (output / "part").write_text(json.dumps([epoch + 1, weight]))
            (output / "part").rename(output / f"model_{epoch:07d}.json")
    return begin, weight


class Trainer:
    def __init__(self, args):
        self.args = args

    def __call__(self):
        self._setup_args()
        return train_files(self.args) if self.args.style == "files" else train_folder(self.args)

    def checkpoint(self):
        if self.args.style == "files":
            self.args.dist_url = get_init_file(self.args).as_uri()
            checkpoint_file = os.path.join(self.args.output_dir, "checkpoint.pth")
            # On an object that has not been called, the folder's name is not complete.
            if os.path.exists(checkpoint_file):
                self.args.resume = checkpoint_file
        print("Requeuing", self.args)
        return submitit.helpers.DelayedSubmission(type(self)(self.args))

    def _setup_args(self):
        job_env = submitit.JobEnvironment()
        self.args.output_dir = str(self.args.output_dir).replace("%j", str(job_env.job_id))
        self.args.gpu = job_env.local_rank
        self.args.rank = job_env.global_rank
        self.args.world_size = job_env.num_tasks
        print(f"Process group: {job_env.num_tasks} tasks, rank: {job_env.global_rank}, {job_env}")


def main():
    args = options()
    executor = submitit.AutoExecutor(folder=args.job_dir, slurm_max_num_timeout=30)
    executor.update_parameters(
        mem_gb=0.5 * args.ngpus if args.style == "files" else 0,
        gpus_per_node=0,
        tasks_per_node=args.ngpus,
        cpus_per_task=1,
        nodes=args.nodes,
        timeout_min=10,
        slurm_partition=args.partition,
        slurm_signal_delay_s=120,
        slurm_comment="of a paper",
    )
    executor.update_parameters(name="paper:train" if args.style == "folder" else "paper")
    args.dist_url = get_init_file(args).as_uri()
    args.output_dir = args.job_dir
    job = executor.submit(Trainer(args))
    print("Submitted job_id:", job.job_id, flush=True)
    if args.wait:
        print("Results:", json.dumps(job.results()), job.state, job.done(), job.num_tasks)
        print("Paths:", job.paths.folder, job.paths.stdout, flush=True)


if __name__ == "__main__":
    main()
