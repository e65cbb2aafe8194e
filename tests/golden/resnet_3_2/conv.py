"""Role "conv" of ResNet: ranks 0 to 2 of 5.  Written by splitc 0.1.0; yours to edit.

in       images  (b, 3, 32, 32)         float32  read by this role
         target  (b,)                   int64    read by this role
out      target  (b,)                   int64    -> fc
         cut0    (b, 32)                float32  -> fc, its gradient comes back
holds    44.3 k parameters, 177 kB
predicts 53.7 MFLOP, 784 us of compute in a step on v100-10gbe
plan     8646523e69cc
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = "8646523e69cc"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.ModuleDict({
            "0": nn.ModuleDict({
                "conv1": nn.Conv2d(4, 4, 3, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(4),
                "conv2": nn.Conv2d(4, 4, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(4),
            }),
            "1": nn.ModuleDict({
                "conv1": nn.Conv2d(4, 4, 3, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(4),
                "conv2": nn.Conv2d(4, 4, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(4),
            }),
        })
        self.layer2 = nn.ModuleDict({
            "0": nn.ModuleDict({
                "conv1": nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(8),
                "conv2": nn.Conv2d(8, 8, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(8),
                "downsample": nn.ModuleDict({
                    "0": nn.Conv2d(4, 8, 1, stride=2, bias=False),
                    "1": nn.BatchNorm2d(8),
                }),
            }),
            "1": nn.ModuleDict({
                "conv1": nn.Conv2d(8, 8, 3, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(8),
                "conv2": nn.Conv2d(8, 8, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(8),
            }),
        })
        self.layer3 = nn.ModuleDict({
            "0": nn.ModuleDict({
                "conv1": nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(16),
                "conv2": nn.Conv2d(16, 16, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(16),
                "downsample": nn.ModuleDict({
                    "0": nn.Conv2d(8, 16, 1, stride=2, bias=False),
                    "1": nn.BatchNorm2d(16),
                }),
            }),
            "1": nn.ModuleDict({
                "conv1": nn.Conv2d(16, 16, 3, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(16),
                "conv2": nn.Conv2d(16, 16, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(16),
            }),
        })
        self.layer4 = nn.ModuleDict({
            "0": nn.ModuleDict({
                "conv1": nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(32),
                "conv2": nn.Conv2d(32, 32, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(32),
                "downsample": nn.ModuleDict({
                    "0": nn.Conv2d(16, 32, 1, stride=2, bias=False),
                    "1": nn.BatchNorm2d(32),
                }),
            }),
            "1": nn.ModuleDict({
                "conv1": nn.Conv2d(32, 32, 3, padding=1, bias=False),
                "bn1": nn.BatchNorm2d(32),
                "conv2": nn.Conv2d(32, 32, 3, padding=1, bias=False),
                "bn2": nn.BatchNorm2d(32),
            }),
        })

    def forward(self, comm, images):
        conv1 = self.conv1(images)                                                        # (b, 4, 32, 32)  resnet.py:55
        relu = F.relu(self.bn1(conv1))                                                      # (b, 4, 32, 32)
        layer1_0_conv1 = self.layer1["0"]["conv1"](relu)                                  # (b, 4, 32, 32)  resnet.py:36
        relu_1 = F.relu(self.layer1["0"]["bn1"](layer1_0_conv1))                            # (b, 4, 32, 32)
        layer1_0_conv2 = self.layer1["0"]["conv2"](relu_1)                                # (b, 4, 32, 32)  resnet.py:37
        relu_2 = F.relu(self.layer1["0"]["bn2"](layer1_0_conv2) + relu)                   # (b, 4, 32, 32)  resnet.py:38
        layer1_1_conv1 = self.layer1["1"]["conv1"](relu_2)                                # (b, 4, 32, 32)  resnet.py:36
        relu_3 = F.relu(self.layer1["1"]["bn1"](layer1_1_conv1))                            # (b, 4, 32, 32)
        layer1_1_conv2 = self.layer1["1"]["conv2"](relu_3)                                # (b, 4, 32, 32)  resnet.py:37
        relu_4 = F.relu(self.layer1["1"]["bn2"](layer1_1_conv2) + relu_2)                 # (b, 4, 32, 32)  resnet.py:38
        layer2_0_conv1 = self.layer2["0"]["conv1"](relu_4)                                # (b, 8, 16, 16)  resnet.py:36
        relu_5 = F.relu(self.layer2["0"]["bn1"](layer2_0_conv1))                            # (b, 8, 16, 16)
        layer2_0_conv2 = self.layer2["0"]["conv2"](relu_5)                                # (b, 8, 16, 16)  resnet.py:37
        layer2_0_bn2 = self.layer2["0"]["bn2"](layer2_0_conv2)                              # (b, 8, 16, 16)
        layer2_0_downsample_0 = self.layer2["0"]["downsample"]["0"](relu_4)               # (b, 8, 16, 16)  resnet.py:38
        layer2_0_downsample_1 = self.layer2["0"]["downsample"]["1"](layer2_0_downsample_0)  # (b, 8, 16, 16)
        relu_6 = F.relu(layer2_0_bn2 + layer2_0_downsample_1)                               # (b, 8, 16, 16)
        layer2_1_conv1 = self.layer2["1"]["conv1"](relu_6)                                # (b, 8, 16, 16)  resnet.py:36
        relu_7 = F.relu(self.layer2["1"]["bn1"](layer2_1_conv1))                            # (b, 8, 16, 16)
        layer2_1_conv2 = self.layer2["1"]["conv2"](relu_7)                                # (b, 8, 16, 16)  resnet.py:37
        relu_8 = F.relu(self.layer2["1"]["bn2"](layer2_1_conv2) + relu_6)                 # (b, 8, 16, 16)  resnet.py:38
        layer3_0_conv1 = self.layer3["0"]["conv1"](relu_8)                                # (b, 16, 8, 8)   resnet.py:36
        relu_9 = F.relu(self.layer3["0"]["bn1"](layer3_0_conv1))                            # (b, 16, 8, 8)
        layer3_0_conv2 = self.layer3["0"]["conv2"](relu_9)                                # (b, 16, 8, 8)   resnet.py:37
        layer3_0_bn2 = self.layer3["0"]["bn2"](layer3_0_conv2)                              # (b, 16, 8, 8)
        layer3_0_downsample_0 = self.layer3["0"]["downsample"]["0"](relu_8)               # (b, 16, 8, 8)   resnet.py:38
        layer3_0_downsample_1 = self.layer3["0"]["downsample"]["1"](layer3_0_downsample_0)  # (b, 16, 8, 8)
        relu_10 = F.relu(layer3_0_bn2 + layer3_0_downsample_1)                              # (b, 16, 8, 8)
        layer3_1_conv1 = self.layer3["1"]["conv1"](relu_10)                               # (b, 16, 8, 8)   resnet.py:36
        relu_11 = F.relu(self.layer3["1"]["bn1"](layer3_1_conv1))                           # (b, 16, 8, 8)
        layer3_1_conv2 = self.layer3["1"]["conv2"](relu_11)                               # (b, 16, 8, 8)   resnet.py:37
        relu_12 = F.relu(self.layer3["1"]["bn2"](layer3_1_conv2) + relu_10)               # (b, 16, 8, 8)   resnet.py:38
        layer4_0_conv1 = self.layer4["0"]["conv1"](relu_12)                               # (b, 32, 4, 4)   resnet.py:36
        relu_13 = F.relu(self.layer4["0"]["bn1"](layer4_0_conv1))                           # (b, 32, 4, 4)
        layer4_0_conv2 = self.layer4["0"]["conv2"](relu_13)                               # (b, 32, 4, 4)   resnet.py:37
        layer4_0_bn2 = self.layer4["0"]["bn2"](layer4_0_conv2)                              # (b, 32, 4, 4)
        layer4_0_downsample_0 = self.layer4["0"]["downsample"]["0"](relu_12)              # (b, 32, 4, 4)   resnet.py:38
        layer4_0_downsample_1 = self.layer4["0"]["downsample"]["1"](layer4_0_downsample_0)  # (b, 32, 4, 4)
        relu_14 = F.relu(layer4_0_bn2 + layer4_0_downsample_1)                              # (b, 32, 4, 4)
        layer4_1_conv1 = self.layer4["1"]["conv1"](relu_14)                               # (b, 32, 4, 4)   resnet.py:36
        relu_15 = F.relu(self.layer4["1"]["bn1"](layer4_1_conv1))                           # (b, 32, 4, 4)
        layer4_1_conv2 = self.layer4["1"]["conv2"](relu_15)                               # (b, 32, 4, 4)   resnet.py:37
        relu_16 = F.relu(self.layer4["1"]["bn2"](layer4_1_conv2) + relu_14)               # (b, 32, 4, 4)   resnet.py:38
        mean = relu_16.mean(dim=(2, 3))                                                   # (b, 32)         resnet.py:57
        return mean


BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 114 kB
        "layer4.1.bn2.bias",
        "layer4.1.bn2.weight",
        "layer4.1.conv2.weight",
        "layer4.1.bn1.bias",
        "layer4.1.bn1.weight",
        "layer4.1.conv1.weight",
        "layer4.0.downsample.1.bias",
        "layer4.0.downsample.1.weight",
        "layer4.0.downsample.0.weight",
        "layer4.0.bn2.bias",
        "layer4.0.bn2.weight",
        "layer4.0.conv2.weight",
    ),
    (  # 63.5 kB
        "layer4.0.bn1.bias",
        "layer4.0.bn1.weight",
        "layer4.0.conv1.weight",
        "layer3.1.bn2.bias",
        "layer3.1.bn2.weight",
        "layer3.1.conv2.weight",
        "layer3.1.bn1.bias",
        "layer3.1.bn1.weight",
        "layer3.1.conv1.weight",
        "layer3.0.downsample.1.bias",
        "layer3.0.downsample.1.weight",
        "layer3.0.downsample.0.weight",
        "layer3.0.bn2.bias",
        "layer3.0.bn2.weight",
        "layer3.0.conv2.weight",
        "layer3.0.bn1.bias",
        "layer3.0.bn1.weight",
        "layer3.0.conv1.weight",
        "layer2.1.bn2.bias",
        "layer2.1.bn2.weight",
        "layer2.1.conv2.weight",
        "layer2.1.bn1.bias",
        "layer2.1.bn1.weight",
        "layer2.1.conv1.weight",
        "layer2.0.downsample.1.bias",
        "layer2.0.downsample.1.weight",
        "layer2.0.downsample.0.weight",
        "layer2.0.bn2.bias",
        "layer2.0.bn2.weight",
        "layer2.0.conv2.weight",
        "layer2.0.bn1.bias",
        "layer2.0.bn1.weight",
        "layer2.0.conv1.weight",
        "layer1.1.bn2.bias",
        "layer1.1.bn2.weight",
        "layer1.1.conv2.weight",
        "layer1.1.bn1.bias",
        "layer1.1.bn1.weight",
        "layer1.1.conv1.weight",
        "layer1.0.bn2.bias",
        "layer1.0.bn2.weight",
        "layer1.0.conv2.weight",
        "layer1.0.bn1.bias",
        "layer1.0.bn1.weight",
        "layer1.0.conv1.weight",
        "bn1.bias",
        "bn1.weight",
        "conv1.weight",
    ),
)


def step(comm, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    comm.send(target, "fc")                            # -> fc  8 B an example
    cut0 = stage(comm, images)
    comm.send(cut0, "fc")                              # -> fc  128 B an example
    total = comm.sum_loss(torch.zeros(()))             # the loss is computed on other ranks
    d_cut0 = comm.recv("fc", (-1, 32), torch.float32)  # <- fc  128 B an example
    with comm.all_reduce(stage, BUCKETS):              # 177 kB in 2 buckets, during backward
        cut0.backward(d_cut0)
    return total.wait()


def evaluate(comm, stage, images, target):
    """The loss of one batch, forward only."""
    comm.send(target, "fc")                 # -> fc  8 B an example
    cut0 = stage(comm, images)
    comm.send(cut0, "fc")                   # -> fc  128 B an example
    total = comm.sum_loss(torch.zeros(()))  # the loss is computed on other ranks
    return total.wait()


def predict(conv, readers, stage, images):
    """The model's output for this rank's examples, forward only."""
    cut0 = stage(conv, images)
    conv.send(cut0, "fc")                                       # -> fc  128 B an example
    cut1_readers = readers.recv("fc", (-1, 10), torch.float32)  # <- fc  40 B an example
    return cut1_readers
