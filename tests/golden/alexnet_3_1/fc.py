"""Role "fc" of AlexNet: rank 3 of 4.  Written by splitc 0.1.0; yours to edit.

in       target  (24,)                  int64    <- conv
         cut0    (24, 192, 13, 13)      float32  <- conv
out      loss
holds    60.8 M parameters, 243 MB
predicts 60.5 GFLOP, 6.96 ms of compute in a step on v100-10gbe
plan     6656c422ce12
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = "6656c422ce12"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.features = nn.ModuleDict({
            "6": nn.Conv2d(192, 384, 3, padding=1),
            "8": nn.Conv2d(384, 256, 3, padding=1),
            "10": nn.Conv2d(256, 256, 3, padding=1),
        })
        self.classifier = nn.ModuleDict({
            "1": nn.Linear(9216, 4096),
            "4": nn.Linear(4096, 4096),
            "6": nn.Linear(4096, 1000),
        })

    def forward(self, comm, cut0):
        features_7 = F.relu(self.features["6"](cut0))                    # (24, 384, 13, 13)  alexnet.py:50
        features_9 = F.relu(self.features["8"](features_7))              # (24, 256, 13, 13)
        features_11 = F.relu(self.features["10"](features_9))            # (24, 256, 13, 13)
        features_12 = F.max_pool2d(features_11, 3, stride=2)             # (24, 256, 6, 6)
        flatten = F.adaptive_avg_pool2d(features_12, (6, 6)).flatten(1)  # (24, 9216)         alexnet.py:51
        classifier_0 = comm.dropout(flatten, 0.5, draw=0)                # (24, 9216)
        classifier_2 = F.relu(self.classifier["1"](classifier_0))        # (24, 4096)
        classifier_3 = comm.dropout(classifier_2, 0.5, draw=1)           # (24, 4096)
        classifier_5 = F.relu(self.classifier["4"](classifier_3))        # (24, 4096)
        classifier_6 = self.classifier["6"](classifier_5)                # (24, 1000)
        return classifier_6

    def loss(self, comm, classifier_6, target):
        cross_entropy = F.cross_entropy(classifier_6, target)  # ()  loss
        return cross_entropy


def step(comm, stage):
    """Forward and backward of one batch; the gradients are left in `.grad`."""
    target = comm.recv("conv", (-1,), torch.int64)                               # <- conv  192 B
    cut0 = comm.recv("conv", (-1, 192, 13, 13), torch.float32).requires_grad_()  # <- conv  3.12 MB
    loss = stage.loss(comm, stage(comm, cut0), target)
    total = comm.sum_loss(loss)                                                  # the global loss
    loss.backward()
    comm.send(cut0.grad, "conv")                                                 # -> conv  3.12 MB
    return total.wait()


def evaluate(comm, stage):
    """The loss of one batch, forward only."""
    target = comm.recv("conv", (-1,), torch.int64)              # <- conv  192 B
    cut0 = comm.recv("conv", (-1, 192, 13, 13), torch.float32)  # <- conv  3.12 MB
    loss = stage.loss(comm, stage(comm, cut0), target)
    total = comm.sum_loss(loss)                                 # the global loss
    return total.wait()


def predict(comm, stage):
    """This rank's part of the model's output, which the readers receive."""
    cut0 = comm.recv("conv", (-1, 192, 13, 13), torch.float32)  # <- conv  3.12 MB
    cut1 = stage(comm, cut0)
    comm.send(cut1, "readers")                                  # -> readers  96.0 kB
    return None
