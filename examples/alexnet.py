"""AlexNet: the convolutions have the FLOPs, the classifier has the parameters.

Five convolutions have nine tenths of the FLOPs and 2.5 M parameters; three linear layers have the
other 58.6 M of 61.1 M.  Data parallelism all-reduces the gradients of all of them in every step;
splitc places the two halves differently.

    splitc inspect examples/alexnet.py --world 4 --cluster v100-10gbe
    splitc compile examples/alexnet.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/alexnet.py --world 4 --input 4x3x224x224
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AlexNet(nn.Module):
    """The layers and parameter names of torchvision's AlexNet, so its checkpoints load."""

    def __init__(self, width: float, num_classes: int) -> None:
        super().__init__()
        c1, c2, c3, c4, c5, hidden = (int(width * n) for n in (64, 192, 384, 256, 256, 4096))
        self.features = nn.Sequential(
            nn.Conv2d(3, c1, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c1, c2, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c2, c3, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c3, c4, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c4, c5, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(c5 * 6 * 6, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(x.flatten(1))


def alexnet(width: float = 1.0, num_classes: int = 1000) -> nn.Module:
    """AlexNet with `width` times the channels and hidden units of the original."""
    return AlexNet(width, num_classes)


model = alexnet
loss = F.cross_entropy


def example(batch: int = 128, image: int = 224) -> tuple[Tensor]:
    """One rank's batch of images, `image` pixels wide and high."""
    return (torch.randn(batch, 3, image, image),)


def target(batch: int = 128, num_classes: int = 1000) -> Tensor:
    """Their classes."""
    return torch.randint(num_classes, (batch,))
