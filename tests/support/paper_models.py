"""The models that the papers count: those of examples, counted by splitc's capture, and those that only tests need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.conv_fc_split import ConvFcSplit, conv_fc_split
from examples.alexnet import alexnet
from examples.vgg16 import VGG, vgg16
from examples.vgg19 import vgg19
from splitc.ir.pass_manager import run_pass
from splitc.ir.program import Program
from splitc.passes.count_costs import CountCosts
from tests.support.capturing import capture
from tests.support.compiled import analyse


class GroupedAlexNet(nn.Module):
    """AlexNet as it was first trained, on two GPUs: the second, fourth and fifth convolutions have two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        sizes = ((9216, 4096), (4096, 4096), (4096, 1000))
        self.fc6, self.fc7, self.fc8 = (nn.Linear(before, after) for before, after in sizes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.fc6(self.features(images).flatten(1)))
        scores: Tensor = self.fc8(F.relu(self.fc7(x)))
        return scores


class SplitBrainVGG(nn.Module):
    """The VGG variant of SplitBrain's table 1, for images of CIFAR-10; the paper counts no biases."""

    channels = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool")

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in self.channels:
            if isinstance(channels, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.ReLU()]
                before = channels
        self.features = nn.Sequential(*layers)
        self.fc0, self.fc1, self.fc2 = (
            nn.Linear(i, o, bias=False) for i, o in ((4096, 1024), (1024, 1024), (1024, 10))
        )

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.fc0(self.features(images).flatten(1)))
        scores: Tensor = self.fc2(F.relu(self.fc1(x)))
        return scores


@cache
def splitbrain_vgg() -> Program:
    """The analysed variant, at a batch of 2."""
    return analyse(SplitBrainVGG(), (torch.randn(2, 3, 32, 32),), torch.randint(10, (2,)), F.cross_entropy)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "AlexNet": alexnet,
    "AlexNet with groups": GroupedAlexNet,
    "VGG-13": partial(VGG, (2, 2, 2, 2, 2), 1.0, 1000, False),
    "VGG-16": vgg16,
    "VGG-19": vgg19,
}


@cache
def counted(name: str) -> ConvFcSplit:
    """One of MODELS for images of 224x224, captured and its costs counted; nobody fills its weights with numbers."""
    with torch.device("meta"):
        model = MODELS[name]()
    program = capture(
        model.to_empty(device="cpu"), (torch.randn(2, 3, 224, 224),), torch.randint(1000, (2,)), F.cross_entropy
    )
    return conv_fc_split(run_pass(CountCosts(), program))


# -- models whose parameters alone are counted -------------------------------------------------------------------------


def parameters(make: Callable[[], nn.Module]) -> int:
    """How many numbers a model trains; it takes no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


def resnet152() -> nn.Module:
    """The layers of ResNet-152 that have parameters: blocks of 1x1, 3x3 and 1x1 convolutions, each with BatchNorm."""
    layers: list[nn.Module] = [_conv(3, 64, 7)]
    before = 64
    for width, depth in ((64, 3), (128, 8), (256, 36), (512, 3)):
        after = 4 * width
        layers.append(_conv(before, after, 1))  # the shortcut of the first block
        for _ in range(depth):
            layers += [_conv(before, width, 1), _conv(width, width, 3), _conv(width, after, 1)]
            before = after
    return nn.Sequential(*layers, nn.Linear(before, 1000))


Size = int | tuple[int, int]
Path = Sequence[tuple[int, Size]]  # output channels and kernel of one convolution after another


def inception_v3() -> nn.Module:
    """The layers of Inception-v3 that have parameters, with its auxiliary classifier."""
    layers: list[nn.Module] = [_path(3, ((32, 3), (32, 3), (64, 3), (80, 1), (192, 3)))]
    before = 192

    def mixed(kept: int, *paths: Path) -> None:
        """Paths side by side, whose outputs are stacked upon `kept` channels that a pooling hands on."""
        nonlocal before
        layers.extend(_path(before, path) for path in paths)
        before = kept + sum(path[-1][0] for path in paths)

    for pooled in (32, 64, 64):
        mixed(0, [(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pooled, 1)])
    mixed(before, [(384, 3)], [(64, 1), (96, 3), (96, 3)])
    for c in (128, 160, 160, 192):
        once: Path = [(c, 1), (c, (1, 7)), (192, (7, 1))]
        twice: Path = [(c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))]
        mixed(0, [(192, 1)], once, twice, [(192, 1)])
    layers += [_path(before, [(128, 1), (768, 5)]), nn.Linear(768, 1000)]  # the auxiliary classifier
    mixed(before, [(192, 1), (320, 3)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)])
    for _ in range(2):
        inputs = before
        mixed(0, [(320, 1)], [(384, 1)], [(448, 1), (384, 3)], [(192, 1)])
        layers += [
            _conv(384, 384, size) for size in ((1, 3), (3, 1)) * 2
        ]  # the second and third path fork at their end
        before += 2 * 384
        assert inputs in (1280, 2048)
    return nn.Sequential(*layers, nn.Linear(before, 1000))


def _path(before: int, path: Path) -> nn.Sequential:
    layers = []
    for after, size in path:
        layers.append(_conv(before, after, size))
        before = after
    return nn.Sequential(*layers)


def _conv(before: int, after: int, size: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, size, bias=False), nn.BatchNorm2d(after))
