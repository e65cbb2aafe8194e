"""ResNet-18 for CIFAR: branches and BatchNorm, and no large head.

Its parameters are in convolutions with many FLOPs per parameter, and its only linear layer is
small, so data parallelism is hard to beat here.  A cut through a block would send both of its
branches, and BatchNorm normalises over the examples of one rank, as under DistributedDataParallel.

    splitc inspect examples/resnet.py --world 4 --cluster v100-10gbe
    splitc compile examples/resnet.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/resnet.py --world 4 --input 8x3x32x32
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False),
                nn.BatchNorm2d(after),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """Four groups of blocks; each but the first halves the image and doubles the channels."""

    def __init__(self, depths: Sequence[int], width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = group(depths[0], width, width, stride=1)
        self.layer2 = group(depths[1], width, 2 * width, stride=2)
        self.layer3 = group(depths[2], 2 * width, 4 * width, stride=2)
        self.layer4 = group(depths[3], 4 * width, 8 * width, stride=2)
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def group(depth: int, before: int, after: int, stride: int) -> nn.Sequential:
    """`depth` blocks, of which the first changes the shape."""
    first = BasicBlock(before, after, stride)
    return nn.Sequential(first, *(BasicBlock(after, after, 1) for _ in range(depth - 1)))


def resnet18(width: int = 64, num_classes: int = 10) -> nn.Module:
    """ResNet-18 for images of 32x32, with `width` channels in its first group."""
    return ResNet((2, 2, 2, 2), width, num_classes)


model = resnet18
loss = F.cross_entropy


def example(batch: int = 128, image: int = 32) -> tuple[Tensor]:
    """One rank's batch of images, `image` pixels wide and high."""
    return (torch.randn(batch, 3, image, image),)


def target(batch: int = 128, num_classes: int = 10) -> Tensor:
    """Their classes."""
    return torch.randint(num_classes, (batch,))
