"""Roles "stage0" and "stage1" and "stage2" of AlexNet: ranks 1 to 3 of 4.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 64, 64)         float32  read by this role
         target  (4,)                   int64    read by this role
         cut0    (4, 2304)              float32  gathered over groups of 2 ranks
out      target  (4,)                   int64    -> stage3
         cut2    (4, 1024)              float32  -> stage3, its gradient comes back
holds    2.39 M parameters, 9.55 MB
predicts 154 MFLOP, 314 us of compute in a step on v100-10gbe
plan     7bf8a28fdc87
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = "7bf8a28fdc87"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.features = nn.ModuleDict({
            "0": nn.Conv2d(3, 16, 11, stride=4, padding=2),
            "3": nn.Conv2d(16, 48, 5, padding=2),
            "6": nn.Conv2d(48, 96, 3, padding=1),
            "8": nn.Conv2d(96, 64, 3, padding=1),
            "10": nn.Conv2d(64, 64, 3, padding=1),
        })
        self.classifier = nn.ModuleDict({
            "1": nn.Linear(2304, 1024),  # sharded, see rankN.py
            "4": nn.Linear(1024, 1024),
        })

    def forward_stage0(self, comm, images):
        features_1 = F.relu(self.features["0"](images))                  # (4, 16, 15, 15)  alexnet.py:50
        features_2 = F.max_pool2d(features_1, 3, stride=2)               # (4, 16, 7, 7)
        features_4 = F.relu(self.features["3"](features_2))              # (4, 48, 7, 7)
        features_5 = F.max_pool2d(features_4, 3, stride=2)               # (4, 48, 3, 3)
        features_7 = F.relu(self.features["6"](features_5))              # (4, 96, 3, 3)
        features_9 = F.relu(self.features["8"](features_7))              # (4, 64, 3, 3)
        features_11 = F.relu(self.features["10"](features_9))            # (4, 64, 3, 3)
        features_12 = F.max_pool2d(features_11, 3, stride=2)             # (4, 64, 1, 1)
        flatten = F.adaptive_avg_pool2d(features_12, (6, 6)).flatten(1)  # (4, 2304)        alexnet.py:51
        classifier_0 = comm.dropout(flatten, 0.5, draw=0)                # (4, 2304)
        return classifier_0

    def forward_stage1(self, comm, cut0):
        classifier_2 = F.relu(self.classifier["1"](cut0))                      # (8, 1024/2)  alexnet.py:51
        classifier_3 = comm.dropout(classifier_2, 0.5, draw=1, features=1024)  # (8, 1024/2)
        # (4, 1024)    features -> batch, 8.19 kB
        classifier_3_own = comm.all_to_all(classifier_3, to="batch", features=1024)
        return classifier_3_own

    def forward_stage2(self, comm, cut1):
        # (4, 1024)  alexnet.py:51
        classifier_4 = comm.late_multiply(cut1, self.classifier["4"].weight, self.classifier["4"].bias)
        classifier_5 = F.relu(classifier_4)  # (4, 1024)
        return classifier_5


STAGE0_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 369 kB
        "features.10.bias",
        "features.10.weight",
        "features.8.bias",
        "features.8.weight",
    ),
    (  # 166 kB
        "features.6.bias",
        "features.6.weight",
    ),
    (  # 100 kB
        "features.3.bias",
        "features.3.weight",
        "features.0.bias",
        "features.0.weight",
    ),
)


STAGE1_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 4.72 MB
        "classifier.1.weight",
    ),
    (  # 2.05 kB
        "classifier.1.bias",
    ),
)


def step(stage0, stage1, stage2, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    stage0.send(target, "stage3")                                # -> stage3  32 B
    cut0 = stage.forward_stage0(stage0, images)
    cut0_group = stage1.modulo(cut0.detach()).requires_grad_()   # all-gather: the examples of all ranks of the group
    cut1 = stage.forward_stage1(stage1, cut0_group)
    cut1_stage2 = cut1.detach().requires_grad_()
    cut2 = stage.forward_stage2(stage2, cut1_stage2)
    stage2.send(cut2, "stage3")                                  # -> stage3  16.4 kB
    total = stage2.sum_loss(torch.zeros(()))                     # the loss is computed on other ranks
    d_cut2 = stage2.recv("stage3", (-1, 1024), torch.float32)    # <- stage3  16.4 kB
    cut2.backward(d_cut2)
    stage2.multiply()                                            # late-multiplied gradients, W' = E^T X
    with stage1.all_reduce(stage, STAGE1_BUCKETS):               # 4.72 MB in 2 buckets, during backward
        cut1.backward(cut1_stage2.grad)
    d_cut0 = stage1.reduce_scatter(cut0_group.grad, to="batch")  # reduce-scatter over the group
    with stage0.all_reduce(stage, STAGE0_BUCKETS):               # 636 kB in 3 buckets, during backward
        cut0.backward(d_cut0)
    return total.wait()


def evaluate(stage0, stage1, stage2, stage, images, target):
    """The loss of one batch, forward only."""
    stage0.send(target, "stage3")             # -> stage3  32 B
    cut0 = stage.forward_stage0(stage0, images)
    cut0_group = stage1.modulo(cut0)          # all-gather: the examples of all ranks of the group
    cut1 = stage.forward_stage1(stage1, cut0_group)
    cut2 = stage.forward_stage2(stage2, cut1)
    stage2.send(cut2, "stage3")               # -> stage3  16.4 kB
    total = stage2.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    return total.wait()


def predict(stage0, stage1, stage2, readers, stage, images):
    """The model's output for this rank's examples, forward only."""
    cut0 = stage.forward_stage0(stage0, images)
    cut0_group = stage1.modulo(cut0)                                # all-gather: the examples of all ranks of the group
    cut1 = stage.forward_stage1(stage1, cut0_group)
    cut2 = stage.forward_stage2(stage2, cut1)
    stage2.send(cut2, "stage3")                                     # -> stage3  16.4 kB
    cut3_readers = readers.recv("stage3", (-1, 10), torch.float32)  # <- stage3  160 B
    return cut3_readers
