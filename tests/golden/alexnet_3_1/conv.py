"""Role "conv" of AlexNet: ranks 0 to 2 of 4.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32  read by this role
         target  (8,)                   int64    read by this role
out      target  (8,)                   int64    -> fc
         cut0    (8, 192, 13, 13)       float32  -> fc, its gradient comes back
holds    331 k parameters, 1.32 MB
predicts 13.0 GFLOP, 1.57 ms of compute in a step on v100-10gbe
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
            "0": nn.Conv2d(3, 64, 11, stride=4, padding=2),
            "3": nn.Conv2d(64, 192, 5, padding=2),
        })

    def forward(self, comm, images):
        features_1 = F.relu(self.features["0"](images))      # (8, 64, 55, 55)   alexnet.py:50
        features_2 = F.max_pool2d(features_1, 3, stride=2)   # (8, 64, 27, 27)
        features_4 = F.relu(self.features["3"](features_2))  # (8, 192, 27, 27)
        features_5 = F.max_pool2d(features_4, 3, stride=2)   # (8, 192, 13, 13)
        return features_5


BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 1.23 MB
        "features.3.weight",
    ),
    (  # 94.0 kB
        "features.3.bias",
        "features.0.bias",
        "features.0.weight",
    ),
)


def step(comm, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    comm.send(target, "fc")                                     # -> fc  64 B
    cut0 = stage(comm, images)
    comm.send(cut0, "fc")                                       # -> fc  1.04 MB
    total = comm.sum_loss(torch.zeros(()))                      # the loss is computed on other ranks
    d_cut0 = comm.recv("fc", (-1, 192, 13, 13), torch.float32)  # <- fc  1.04 MB
    with comm.all_reduce(stage, BUCKETS):                       # 1.32 MB in 2 buckets, during backward
        cut0.backward(d_cut0)
    return total.wait()


def evaluate(comm, stage, images, target):
    """The loss of one batch, forward only."""
    comm.send(target, "fc")                 # -> fc  64 B
    cut0 = stage(comm, images)
    comm.send(cut0, "fc")                   # -> fc  1.04 MB
    total = comm.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    return total.wait()


def predict(conv, readers, stage, images):
    """The model's output for this rank's examples, forward only."""
    cut0 = stage(conv, images)
    conv.send(cut0, "fc")                                         # -> fc  1.04 MB
    cut1_readers = readers.recv("fc", (-1, 1000), torch.float32)  # <- fc  32.0 kB
    return cut1_readers
