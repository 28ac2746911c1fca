"""Runs a script on stand-in devices with the fused GRU cell of CUDA, which has no kernel for CPUs.

with_gru.py SCRIPT [ARG...]
"""

import runpy
import sys

import torch


def cell(inputs, hidden, state, input_bias=None, hidden_bias=None):
    """The new state and what the backward needs: reset and update gates, candidate, state, and its own gate."""
    inputs, hidden = (x if bias is None else x + bias for x, bias in ((inputs, input_bias), (hidden, hidden_bias)))
    (in_reset, in_update, in_new), (reset, update, own) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    reset, update = (in_reset + reset).sigmoid(), (in_update + update).sigmoid()
    new = (in_new + reset * own).tanh()
    return (state - new) * update + new, torch.cat([reset, update, new, state, own], 1)


def backward(gradient, workspace, has_bias):
    """Of both sums of gates, the state and both biases."""
    reset, update, new, state, own = workspace.chunk(5, 1)
    of_new = gradient * (1 - update) * (1 - new * new)
    of_update = gradient * (state - new) * update * (1 - update)
    of_reset = of_new * own * reset * (1 - reset)
    inputs = torch.cat([of_reset, of_update, of_new], 1)
    hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, gradient * update, *biases


library = torch.library.Library("aten", "IMPL")
library.impl("_thnn_fused_gru_cell", cell, "CUDA")
library.impl("_thnn_fused_gru_cell_backward", backward, "CUDA")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
