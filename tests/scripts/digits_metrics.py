"""The digits job's evaluation of given predictions: digits_metrics.py DIGITS.py ACTUAL PREDICTED, digits in a row."""

import runpy
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import clusterddp


class Given(torch.nn.Module):
    """Predicts what the 'image' is."""

    def forward(self, predictions):
        return F.one_hot(predictions, 10).float()


digits = runpy.run_path(sys.argv[1])
actual, predicted = (torch.tensor([int(digit) for digit in word]) for word in sys.argv[2:])
ctx = clusterddp.init()
loader = ctx.eval_loader(TensorDataset(predicted, actual), batch_size=7)
sizes = [len(labels) for _, labels in loader]
accuracy, f1 = digits["evaluate"](ctx, Given(), loader)
print(f"batches of {sizes}: accuracy {accuracy!r}, macro-F1 {f1!r}")
