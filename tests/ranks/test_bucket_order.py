"""DDP makes its buckets by itself, from the first backward, and a resumed run has the same ones from its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp

SCRIPT = Path(__file__).parents[1] / "scripts" / "bucket_orders.py"
RANKS, STEPS = 3, 4


class Trained:
    """One run, in as many attempts as there are numbers in ``until``, each of which ends after that step."""

    def __init__(self, folder: Path, *until: int) -> None:
        self.directory = RunDirectory(folder / "run")
        #: By step, then by ours or plain DDP: the buckets of each model.
        self.buckets: dict[int, dict[str, dict[str, list[list[str]]]]] = {}
        for number, steps in enumerate(until):
            attempt = ddp.run(SCRIPT, self.directory, steps, ranks=RANKS, folder=folder / f"out-{number}")
            for line in attempt.output(0).splitlines():
                if line.startswith("["):
                    step, who, found = json.loads(line)
                    self.buckets.setdefault(step, {})[who] = found
        self.weights = [attempt.output(rank).split("weights ")[1] for rank in range(RANKS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("whole"), STEPS)


def test_gradients_are_reduced_in_plain_ddps_order(whole: Trained) -> None:
    """Buckets, and the parameters in them. With all_used_once, DDP counts when the model is wrapped, a step earlier."""
    for step in range(STEPS):
        ours, plain = whole.buckets[step]["ours"], whole.buckets[step]["plain"]
        assert [name for name in ours if ours[name] != plain[name]] in ([], ["static"] * (step < STEPS - 1)), step
    last = whole.buckets[STEPS - 1]["ours"]
    assert all(len(found) > 2 for found in last.values())
    # A frozen order of registration would be another one.
    assert last["decoder first"][0][0].startswith("first.2") and last["in order"][0][0].startswith("last.1")


def test_a_resumed_run_has_the_buckets_and_the_bits_of_the_uninterrupted_one(tmp_path: Path, whole: Trained) -> None:
    """Saved before the buckets are made again, after it, and while one model has had no backward."""
    resumed = Trained(tmp_path, 1, 2, STEPS)
    assert {step: found["ours"] for step, found in resumed.buckets.items()} == {
        step: found["ours"] for step, found in whole.buckets.items()
    }
    assert resumed.weights == whole.weights
    events = resumed.directory.events()
    assert [event["inexact"] for event in events if event["event"] == "resumed"] == [[], []]


def test_an_order_of_other_parameters_is_not_used_and_reported(tmp_path: Path) -> None:
    run = Trained(tmp_path, 1).directory
    ddp.run(SCRIPT, run, 2, "--frozen", ranks=RANKS, folder=tmp_path / "frozen")
    (resumed,) = [event for event in run.events() if event["event"] == "resumed"]
    assert [reason for reason in resumed["inexact"] if "order" in reason and "DecoderFirst" in reason]


def test_a_stop_inside_a_step_saves_the_order_from_before_it() -> None:
    from clusterddp.distributed.bucket_order import KEY, BucketOrders

    orders = BucketOrders(lambda: None)
    order: Any = type("Order", (), {"names": [], "before": [], "restored": [], "model": "Net"})()
    orders._orders, orders._open = [order], [order]
    orders.begin_step()
    order.names = ["b", "a"]
    assert (orders.progress(True), orders.progress(False)) == ({KEY: [[]]}, {KEY: [["b", "a"]]})
    orders.begin_step()
    assert orders.progress(True) == {KEY: [["b", "a"]]}
    assert orders.restore({KEY: [["b", "a"]]}) and orders.restore({}) and not orders.restore({KEY: [[]]})


IN_A_FOLDER = """
import hashlib, sys
import torch
import clusterddp

ctx = clusterddp.init(device="cpu", seed=3)
torch.manual_seed(5)


class DecoderFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.encoder = (torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))) for _ in "ab")

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = ctx.wrap(DecoderFirst(), bucket_cap_mb=0.01)
names = {parameter: name for name, parameter in model.module.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with clusterddp.CheckpointFolder(sys.argv[1]) as folder:
    step = folder.restore(model=model, optimizer=optimizer)
    while step < int(sys.argv[2]):
        generator = torch.Generator().manual_seed(100 * step + ctx.rank)
        optimizer.zero_grad()
        model(torch.randn(6, 32, generator=generator)).square().sum().backward()
        buckets = model.reducer._get_zeros_like_grad_buckets()
        print("buckets", step, [[names[one] for one in bucket.parameters()] for bucket in buckets])
        optimizer.step()
        step += 1
    folder.save(step, model=model, optimizer=optimizer)
state = b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())
print("weights", hashlib.sha256(state).hexdigest())
"""


def test_a_checkpoint_folder_keeps_the_order_of_models_that_ctx_wrap_has_made(tmp_path: Path) -> None:
    """Saved before DDP makes its buckets again."""
    (script := tmp_path / "in_a_folder.py").write_text(IN_A_FOLDER)
    (whole,) = folder_attempts(script, tmp_path / "whole", 3)
    first, second = folder_attempts(script, tmp_path / "stopped", 1, 3)
    assert [*first[:1], *second] == whole


def folder_attempts(script: Path, folder: Path, *until: int) -> list[list[str]]:
    """The lines of rank 0 in each attempt."""
    out = folder.with_name(f"out-{folder.name}")
    run = [ddp.run(script, folder, steps, ranks=RANKS, folder=out / str(steps)) for steps in until]
    return [[line for line in one.output(0).splitlines() if line.startswith(("buckets", "weights"))] for one in run]
