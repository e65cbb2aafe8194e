"""VGG-19: sixteen convolutions with 20.0 M parameters below three linear layers with 123.6 M.

Its convolutions have a quarter more FLOPs than those of VGG-16; `classifier.0` alone holds 102.8 M
of its 143.7 M parameters.

    splitc inspect examples/vgg19.py --world 4 --cluster v100-10gbe
    splitc compile examples/vgg19.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/vgg19.py --world 4 --input 2x3x224x224
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Configuration E: channels of a block and its convolutions of 3x3; a pooling follows each block."""


class VGG19(nn.Module):
    """The layers and parameter names of torchvision's VGG-19, so its checkpoints load."""

    def __init__(self, width: float, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before, hidden = 3, int(width * 4096)
        for channels, depth in BLOCKS:
            after = int(width * channels)
            for _ in range(depth):
                conv = nn.Conv2d(before, after, kernel_size=3, padding=1)
                # torch's own initialisation fades out over so many layers
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                layers += [conv, nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(before * 7 * 7, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(x.flatten(1))


def vgg19(width: float = 1.0, num_classes: int = 1000) -> nn.Module:
    """VGG-19 with `width` times the channels and hidden units of the original."""
    return VGG19(width, num_classes)


model = vgg19
loss = F.cross_entropy


def example(batch: int = 64, image: int = 224) -> tuple[Tensor]:
    """One rank's batch of images, `image` pixels wide and high."""
    return (torch.randn(batch, 3, image, image),)


def target(batch: int = 64, num_classes: int = 1000) -> Tensor:
    """Their classes."""
    return torch.randint(num_classes, (batch,))
