"""Roles "conv" and "fc" and "fc2" of AlexNet: ranks 1 to 3 of 4.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 64, 64)         float32  read by this role
         target  (4,)                   int64    read by this role
         cut0    (4, 2304)              float32  gathered over groups of 2 ranks
out      target  (4,)                   int64    -> fc3
         cut2    (4, 1024)              float32  -> fc3, its gradient comes back
holds    2.39 M parameters, 9.55 MB
predicts 154 MFLOP, 314 us of compute in a step on v100-10gbe
plan     8c05ef49091d
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = "8c05ef49091d"


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

    def forward_conv(self, comm, images):
        features_1 = F.relu(self.features["0"](images))                  # (4, 16, 15, 15)  alexnet.py:50
        features_2 = F.max_pool2d(features_1, 3, stride=2)               # (4, 16, 7, 7)
        features_4 = F.relu(self.features["3"](features_2))              # (4, 48, 7, 7)
        features_5 = F.max_pool2d(features_4, 3, stride=2)               # (4, 48, 3, 3)
        features_7 = F.relu(self.features["6"](features_5))              # (4, 96, 3, 3)
        features_9 = F.relu(self.features["8"](features_7))              # (4, 64, 3, 3)
        features_11 = F.relu(self.features["10"](features_9))            # (4, 64, 3, 3)
        features_12 = F.max_pool2d(features_11, 3, stride=2)             # (4, 64, 1, 1)
        flatten = F.adaptive_avg_pool2d(features_12, (6, 6)).flatten(1)  # (4, 2304)        alexnet.py:51
        classifier_0 = comm.dropout(flatten, 0.5, layer="classifier.0")  # (4, 2304)
        return classifier_0

    def forward_fc(self, comm, cut0):
        classifier_2 = F.relu(self.classifier["1"](cut0))                                   # (8, 1024/2)  alexnet.py:51
        classifier_3 = comm.dropout(classifier_2, 0.5, layer="classifier.3", sharded=True)  # (8, 1024/2)
        classifier_3_whole = comm.shard(classifier_3, features=1024, partial=False)         # (8, 1024)
        return classifier_3_whole

    def forward_fc2(self, comm, cut1):
        classifier_4 = comm.late_multiply(                                                    # (4, 1024)  alexnet.py:51
            cut1, self.classifier["4"].weight, self.classifier["4"].bias
        )
        classifier_5 = F.relu(classifier_4)                                                   # (4, 1024)
        return classifier_5


CONV_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 636 kB
        "features.10.bias",
        "features.10.weight",
        "features.8.bias",
        "features.8.weight",
        "features.6.bias",
        "features.6.weight",
        "features.3.bias",
        "features.3.weight",
        "features.0.bias",
        "features.0.weight",
    ),
)


FC_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 4.72 MB
        "classifier.1.bias",
        "classifier.1.weight",
    ),
)


def step(conv, fc, fc2, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    conv.send(target, "fc3")                             # -> fc3  32 B
    cut0 = stage.forward_conv(conv, images)
    cut0_group = fc.modulo(cut0).requires_grad_()        # of all ranks of the group
    cut1 = stage.forward_fc(fc, cut0_group)
    cut1_slice = fc.slice_batch(cut1)                    # this rank's own examples
    cut1_fc2 = cut1_slice.detach().requires_grad_()
    cut2 = stage.forward_fc2(fc2, cut1_fc2)
    fc2.send(cut2, "fc3")                                # -> fc3  16.4 kB
    total = fc2.sum_loss(torch.zeros(()))                # the loss is computed on other ranks
    d_cut2 = fc2.recv("fc3", (-1, 1024), torch.float32)  # <- fc3  16.4 kB
    cut2.backward(d_cut2)
    fc2.multiply()                                       # late-multiplied gradients, W' = E^T X
    d_cut1_group = fc.all_gather_grad(cut1_fc2.grad)     # of all ranks of the group
    with fc.all_reduce(stage, FC_BUCKETS):               # 4.72 MB in 1 bucket, during backward
        cut1.backward(d_cut1_group)
    d_cut0 = fc.modulo_grad(cut0_group.grad)             # summed over the group
    with conv.all_reduce(stage, CONV_BUCKETS):           # 636 kB in 1 bucket, during backward
        cut0.backward(d_cut0)
    return total.wait()


def evaluate(conv, fc, fc2, stage, images, target):
    """The loss of one batch, forward only."""
    conv.send(target, "fc3")               # -> fc3  32 B
    cut0 = stage.forward_conv(conv, images)
    cut0_group = fc.modulo(cut0)           # of all ranks of the group
    cut1 = stage.forward_fc(fc, cut0_group)
    cut1_slice = fc.slice_batch(cut1)      # this rank's own examples
    cut2 = stage.forward_fc2(fc2, cut1_slice)
    fc2.send(cut2, "fc3")                  # -> fc3  16.4 kB
    total = fc2.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    return total.wait()
