"""AWS HyperPod with the usual life cycle scripts: no GRES, and memory that Slurm does not know.

Sources, in github.com/aws-samples/awsome-distributed-training: llama3_1_8b-training.sbatch (3.test_cases/pytorch/FSDP)
and hyperpod-precheck.py (1.architectures/5.sagemaker-hyperpod), which refuses ``--gpus`` and ``--gres=gpu`` in scripts.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 4 --gpus 8"
EXPECTED = "--exclusive -N 4 --ntasks-per-node=8"
ACCEPTED = "--nodes=4 --job-name=llama3_1_8b-FSDP --output=logs/%x_%j.out --error=logs/%x_%j.err --exclusive"
REFUSED = "--nodes=4 --exclusive --gres=gpu:8"


def refusal(options: Options) -> str | None:
    """Nothing that Slurm does not refuse itself."""
    return None
