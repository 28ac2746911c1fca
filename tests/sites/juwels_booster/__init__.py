"""JSC JUWELS Booster. GPUs by --gres, and a network of their own between the nodes.

Sources: apps.fz-juelich.de/jsc/hps/juwels/batchsystem; a script of users of two nodes.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --gpus 4"
EXPECTED = "-A myproject -p booster --gres=gpu:4 -N 2 --ntasks-per-node=4"
ACCEPTED = (
    "--account=transfernetx --nodes=2 --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=12 --time=06:00:00 "
    "--partition=booster --job-name=openlm --output=logs/%x_%j.out"
)
REFUSED = "--nodes=2 --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=12 --time=06:00:00 --partition=booster"


def refusal(options: Options) -> str | None:
    """A budget is required."""
    return None if options.get("account") else "Project not specified. Use --account"
