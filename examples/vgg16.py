"""VGG-16 and VGG-19: one linear layer holds three quarters of the parameters.

`classifier.0` alone holds 102.8 M of VGG-16's 138.4 M parameters and has less than one hundredth
of its FLOPs, so it gains more than any other layer from a separate placement.

    splitc inspect examples/vgg16.py --world 4 --cluster v100-10gbe
    splitc compile examples/vgg16.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/vgg16.py --world 4 --input 2x3x224x224

`examples/vgg16.py:vgg19` is the deeper model.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VGG(nn.Module):
    """The layers and parameter names of torchvision's VGG, so its checkpoints load."""

    def __init__(self, depths: Sequence[int], width: float, num_classes: int, batch_norm: bool) -> None:
        super().__init__()
        channels = [int(width * n) for n in (64, 128, 256, 512, 512)]
        hidden = int(width * 4096)
        self.features = nn.Sequential(*features(depths, channels, batch_norm))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(channels[-1] * 7 * 7, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )
        for layer in self.features:  # torch's own initialisation fades out over so many layers
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(x.flatten(1))


def features(depths: Sequence[int], channels: Sequence[int], batch_norm: bool) -> list[nn.Module]:
    """Block i has depths[i] convolutions with channels[i] outputs, then a pooling."""
    layers: list[nn.Module] = []
    before = 3
    for depth, after in zip(depths, channels, strict=True):
        for _ in range(depth):
            layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU())
            before = after
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return layers


def vgg16(width: float = 1.0, num_classes: int = 1000, batch_norm: bool = False) -> nn.Module:
    """VGG-16 with `width` times the channels and hidden units of the original."""
    return VGG((2, 2, 3, 3, 3), width, num_classes, batch_norm)


def vgg19(width: float = 1.0, num_classes: int = 1000, batch_norm: bool = False) -> nn.Module:
    """VGG-19 with `width` times the channels and hidden units of the original."""
    return VGG((2, 2, 4, 4, 4), width, num_classes, batch_norm)


model = vgg16
loss = F.cross_entropy


def example(batch: int = 64, image: int = 224) -> tuple[Tensor]:
    """One rank's batch of images, `image` pixels wide and high."""
    return (torch.randn(batch, 3, image, image),)


def target(batch: int = 64, num_classes: int = 1000) -> Tensor:
    """Their classes."""
    return torch.randint(num_classes, (batch,))
