"""NHR@FAU Alex. Jobs of several nodes have a QOS of their own and whole nodes. Jobs get no variables of the shell.

Sources: doc.nhr.fau.de/clusters/alex, "Multi-node job"; a script of a user.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --time 24:00:00 --on a100"
EXPECTED = "-p a100 -q a100multi --gres=gpu:a100:8 -N 2 --ntasks-per-node=8 --cpus-per-task=16 --export=NONE"
ACCEPTED = (
    "--time=24:00:00 --ntasks-per-node=8 --nodes=2 --partition=a100 --qos=a100multi --gres=gpu:a100:8 -C a100_80 "
    "--export=NONE"
)
REFUSED = "--time=24:00:00 --ntasks-per-node=8 --nodes=2 --partition=a100 --gres=gpu:a100:8 -C a100_80 --export=NONE"


def refusal(options: Options) -> str | None:
    """Without the QOS, a partition has a limit of one node."""
    several = options.get("nodes", "1") != "1"
    return "Node count specification invalid" if several and "multi" not in options.get("qos", "") else None
