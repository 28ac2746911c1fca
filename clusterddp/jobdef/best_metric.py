"""Which value of a metric is best, as users write it: ``accuracy``, ``loss``, ``score min``, ``-score``."""

from __future__ import annotations

import re

#: Words in the names of metrics of which the smallest value is best, if the user does not say.
_SMALLEST = ("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "mae", "wer", "cer", "fid")


def best_metric(text: str) -> tuple[str, bool] | None:
    """The metric, and whether its smallest value is best; None if the text says no such thing.

    ``max``, ``min`` or a minus sign decide, else the name: of ``loss`` and ``val_error`` the smallest, of others the
    largest.
    """
    match = re.fullmatch(r"(-?)([^\s-]\S*)(?: (max|min))?", text)
    if match is None or (match[1] and match[3]):
        return None
    minus, metric, order = match.groups()
    return metric, bool(minus) or (order == "min" if order else is_loss(metric))


def is_loss(metric: str) -> bool:
    """Whether the smallest value of a metric of this name is best."""
    return any(word in _SMALLEST or word.endswith("loss") for word in re.split("[^a-z]+", metric.lower()))
