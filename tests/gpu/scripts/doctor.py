"""What doctor and preflight check on the devices of two ranks: doctor.py PCI, a folder like /sys/bus/pci/devices"""

import os
import sys
from pathlib import Path

import torch

from clusterddp import environment, protocol
from clusterddp.checks import node, probe
from clusterddp.training import preflight

os.environ[protocol.DEVICE], os.environ[protocol.TOKEN] = "cuda", "secret"
ranks = environment.read(os.environ)
device, node.PCI = torch.device("cuda", ranks.rank), Path(sys.argv[1])
for check in probe.of_the_device(ranks):
    print(check.state, check.name, check.found)
print(preflight.bounded("compute", lambda: node.multiply(device), 60.0, device).found)
place = probe.Place(ranks.rank, 2, "127.0.0.1", int(os.environ["MASTER_PORT"]), 0, ["n1"])
print(probe.reduced(ranks, place, device).found)
matmul = torch.Tensor.__matmul__
torch.Tensor.__matmul__ = lambda left, right: (
    matmul(left, right) + (left.dtype == torch.float16) * torch.eye(len(left), dtype=left.dtype, device=left.device)
)
print(node.multiply(device).found, flush=True)
os._exit(0)  # as a probe does
