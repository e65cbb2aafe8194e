"""Role "server" of MLP: ranks 2 3 of 4.  Written by splitc 0.1.0; yours to edit.

holds    its rows of the parameters, which rankN.py lists
plan     db4f632aa5bc
"""

import torch
from torch import nn

from served import SERVED

PLAN = "db4f632aa5bc"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleDict({
            "0": nn.ParameterDict({
                "weight": nn.Parameter(torch.empty((16, 20))),
                "bias": nn.Parameter(torch.empty((16,))),
            }),
            "1": nn.ParameterDict({
                "weight": nn.Parameter(torch.empty((33, 16))),
                "bias": nn.Parameter(torch.empty((33,))),
            }),
        })
        self.output = nn.ParameterDict({
            "weight": nn.Parameter(torch.empty((10, 33))),
            "bias": nn.Parameter(torch.empty((10,))),
        })

    def forward(self, comm):
        return None


def step(comm, stage):
    """Send parameters to the workers and leave the sum of their gradients in `.grad`."""
    comm.send_parameters(stage, SERVED)     # to the workers
    total = comm.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    comm.reduce_gradients(stage, SERVED)    # summed over the workers
    return total.wait()


def evaluate(comm, stage):
    """Send parameters to the workers, which compute the loss of one batch."""
    comm.send_parameters(stage, SERVED)     # to the workers
    total = comm.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    return total.wait()


def predict(comm, stage):
    """Send parameters to the workers, which compute the model's output."""
    comm.send_parameters(stage, SERVED)  # to the workers
    return None
