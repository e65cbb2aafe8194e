"""Role "all" of AlexNet: ranks 0 1 of 2.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32  read by this role
         target  (8,)                   int64    read by this role
out      loss
holds    61.1 M parameters, 244 MB
predicts 33.2 GFLOP, 4.74 ms of compute in a step on v100-10gbe
plan     6049038bc16c
"""

import torch.nn.functional as F
from torch import nn

PLAN = "6049038bc16c"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.features = nn.ModuleDict({
            "0": nn.Conv2d(3, 64, 11, stride=4, padding=2),
            "3": nn.Conv2d(64, 192, 5, padding=2),
            "6": nn.Conv2d(192, 384, 3, padding=1),
            "8": nn.Conv2d(384, 256, 3, padding=1),
            "10": nn.Conv2d(256, 256, 3, padding=1),
        })
        self.classifier = nn.ModuleDict({
            "1": nn.Linear(9216, 4096),
            "4": nn.Linear(4096, 4096),
            "6": nn.Linear(4096, 1000),
        })

    def weigh(self, comm, target):
        cross_entropy_weight = comm.global_weight(target)  # ()  loss
        return cross_entropy_weight

    def forward(self, comm, images):
        features_1 = F.relu(self.features["0"](images))                  # (8, 64, 55, 55)   alexnet.py:50
        features_2 = F.max_pool2d(features_1, 3, stride=2)               # (8, 64, 27, 27)
        features_4 = F.relu(self.features["3"](features_2))              # (8, 192, 27, 27)
        features_5 = F.max_pool2d(features_4, 3, stride=2)               # (8, 192, 13, 13)
        features_7 = F.relu(self.features["6"](features_5))              # (8, 384, 13, 13)
        features_9 = F.relu(self.features["8"](features_7))              # (8, 256, 13, 13)
        features_11 = F.relu(self.features["10"](features_9))            # (8, 256, 13, 13)
        features_12 = F.max_pool2d(features_11, 3, stride=2)             # (8, 256, 6, 6)
        flatten = F.adaptive_avg_pool2d(features_12, (6, 6)).flatten(1)  # (8, 9216)         alexnet.py:51
        classifier_0 = comm.dropout(flatten, 0.5, draw=0)                # (8, 9216)
        classifier_2 = F.relu(self.classifier["1"](classifier_0))        # (8, 4096)
        classifier_3 = comm.dropout(classifier_2, 0.5, draw=1)           # (8, 4096)
        classifier_5 = F.relu(self.classifier["4"](classifier_3))        # (8, 4096)
        classifier_6 = self.classifier["6"](classifier_5)                # (8, 1000)
        return classifier_6

    def loss(self, comm, classifier_6, target, cross_entropy_weight):
        cross_entropy = F.cross_entropy(classifier_6, target, reduction="sum")  # ()  loss
        loss = cross_entropy / cross_entropy_weight.wait()                      # ()
        return loss


BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 16.4 MB
        "classifier.6.weight",
    ),
    (  # 67.1 MB
        "classifier.4.weight",
    ),
    (  # 151 MB
        "classifier.1.weight",
    ),
    (  # 5.94 MB
        "classifier.6.bias",
        "classifier.4.bias",
        "classifier.1.bias",
        "features.10.bias",
        "features.10.weight",
        "features.8.bias",
        "features.8.weight",
    ),
    (  # 3.98 MB
        "features.6.bias",
        "features.6.weight",
        "features.3.bias",
        "features.3.weight",
        "features.0.bias",
        "features.0.weight",
    ),
)


def step(comm, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    cross_entropy_weight = stage.weigh(comm, target)  # what the loss divides by
    loss = stage.loss(comm, stage(comm, images), target, cross_entropy_weight)
    total = comm.sum_loss(loss)                       # the global loss
    with comm.all_reduce(stage, BUCKETS):             # 244 MB in 5 buckets, during backward
        loss.backward()
    return total.wait()


def evaluate(comm, stage, images, target):
    """The loss of one batch, forward only."""
    cross_entropy_weight = stage.weigh(comm, target)  # what the loss divides by
    loss = stage.loss(comm, stage(comm, images), target, cross_entropy_weight)
    total = comm.sum_loss(loss)                       # the global loss
    return total.wait()


def predict(comm, stage, images):
    """The model's output for this rank's examples, forward only."""
    cut0 = stage(comm, images)
    return cut0
