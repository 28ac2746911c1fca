"""This rank's numbers: ``place.py [--join]`` prints them as a line of JSON, after all ranks have met if asked to."""

import json
import os
import socket
import sys

import clusterddp
from clusterddp import environment

place = {**environment.read(os.environ).exports(), "host": socket.gethostname(), "procid": os.environ["SLURM_PROCID"]}
if "--join" in sys.argv:
    with clusterddp.init(device="cpu") as ctx:
        place["met"] = ctx.all_reduce_sum(1.0)
print(json.dumps(place) + "\n", end="", flush=True)  # in one piece: the ranks share the pipe
