"""Role "worker" of MLP: ranks 0 1 of 4.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32  read by this role
         target  (4,)                   int64    read by this role
out      loss
holds    1.24 k parameters, 4.95 kB
predicts 25.7 kFLOP, 100 us of compute in a step on v100-10gbe
plan     db4f632aa5bc
"""

import torch.nn.functional as F
from torch import nn

from served import SERVED

PLAN = "db4f632aa5bc"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleDict({
            "0": nn.Linear(20, 16),
            "1": nn.Linear(16, 33),
        })
        self.output = nn.Linear(33, 10)

    def weigh(self, comm, target):
        cross_entropy_weight = comm.global_weight(target)  # ()  loss
        return cross_entropy_weight

    def forward(self, comm, images):
        flatten = images.flatten(1)               # (4, 20)                mlp.py:29
        comm.pull(0)                              # 4.95 kB of parameters
        relu = F.relu(self.hidden["0"](flatten))  # (4, 16)                mlp.py:31
        relu_1 = F.relu(self.hidden["1"](relu))   # (4, 33)
        output = self.output(relu_1)              # (4, 10)                mlp.py:32
        return output

    def loss(self, comm, output, target, cross_entropy_weight):
        cross_entropy = F.cross_entropy(output, target, reduction="sum")  # ()  loss
        loss = cross_entropy / cross_entropy_weight.wait()                # ()
        return loss


def step(comm, stage, images, target):
    """Forward and backward of one batch; the gradients go to the servers."""
    comm.start_pulls(stage, SERVED["worker"])         # parameters begin to arrive
    cross_entropy_weight = stage.weigh(comm, target)  # what the loss divides by
    loss = stage.loss(comm, stage(comm, images), target, cross_entropy_weight)
    total = comm.sum_loss(loss)                       # the global loss
    with comm.push(stage, SERVED["worker"]):          # 4.95 kB in 1 bucket, during backward
        loss.backward()
    return total.wait()


def evaluate(comm, stage, images, target):
    """The loss of one batch, forward only."""
    comm.start_pulls(stage, SERVED["worker"])         # parameters begin to arrive
    cross_entropy_weight = stage.weigh(comm, target)  # what the loss divides by
    loss = stage.loss(comm, stage(comm, images), target, cross_entropy_weight)
    total = comm.sum_loss(loss)                       # the global loss
    return total.wait()


def predict(comm, stage, images):
    """The model's output for this rank's examples, forward only."""
    comm.start_pulls(stage, SERVED["worker"])  # parameters begin to arrive
    cut0 = stage(comm, images)
    return cut0
