"""Passes over a loader that differ between ranks are an error that names them, if the script counts epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ddp

SCRIPT = """
import sys
import torch
import clusterddp

how, kind = sys.argv[1], sys.argv[2]
ctx = clusterddp.init(device="cpu")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(5 + 2 * ctx.rank):
            yield torch.full((4,), float(i))


def sized():
    return torch.utils.data.TensorDataset(torch.ones(5 + 2 * ctx.rank, 4))


loader = torch.utils.data.DataLoader(Stream() if kind == "stream" else sized(), batch_size=1)
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for batch in run.epochs(3) if how == "epochs" else run.steps(16):
    x = batch if torch.is_tensor(batch) else batch[0]
    if how == "every":
        run.every(epochs=1)
    model(x).sum().backward()
    optimizer.step()
    if how == "end of epoch":
        run.end_of_epoch
print("completed", run.step, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "kind"), [("end of epoch", "stream"), ("every", "stream"), ("end of epoch", "sized"), ("epochs", "sized")]
)
def test_passes_that_differ_between_ranks_are_an_error_that_names_them(tmp_path: Path, how: str, kind: str) -> None:
    """A scheduler would be stepped more often on one rank, and evaluations would not meet."""
    (script := tmp_path / "uneven.py").write_text(SCRIPT)
    ranks = ddp.start(script, how, kind, ranks=2, folder=tmp_path / "out").wait()
    assert any(ranks.codes)
    assert "ValueError: the ranks' passes over DataLoader differ" in ranks.text()
    assert "completed" not in ranks.text()


@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_a_script_that_counts_steps_may_have_passes_of_any_length(tmp_path: Path, kind: str) -> None:
    """Its schedule does not depend on them."""
    (script := tmp_path / "uneven.py").write_text(SCRIPT)
    ranks = ddp.run(script, "steps", kind, ranks=2, folder=tmp_path / "out")
    assert ranks.text().count("completed 16") == 2
