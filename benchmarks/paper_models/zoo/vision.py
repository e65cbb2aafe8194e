"""Segmentation with losses over the batch, detection with masks and lists, mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

WIDTH, CLASSES = 8, 3


class Unet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._double(1, 4), self._double(4, 8)
        self.up, self.third = nn.ConvTranspose2d(8, 4, 2, 2), self._double(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def _double(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        return self.head(self.third(torch.cat([a, self.up(b)], 1)))


def masks(n: int, generator: torch.Generator) -> Batch:
    """Images and masks."""
    return (normal(generator, n, 1, 8, 8),), ids(generator, 2, n, 1, 8, 8).double()


def dice(scores: Tensor, target: Tensor) -> Tensor:
    """Overlap over the whole batch, beside cross entropy."""
    found = scores.sigmoid()
    both = (found * target).sum()
    overlap = (2 * both + 1) / (found.sum() + target.sum() + 1)
    return F.binary_cross_entropy_with_logits(scores, target) + 1 - overlap


class VNet(Unet):
    """Without the norm, and with residuals; its loss is of each image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def dice_of_each(scores: Tensor, target: Tensor) -> Tensor:
    """Overlap of each image, with squares in the denominator."""
    found, wanted = scores.sigmoid().flatten(1), target.flatten(1)
    return (1 - 2 * (found * wanted).sum(1) / (found.pow(2).sum(1) + wanted.pow(2).sum(1) + 1e-6)).mean()


class Yolo(nn.Module):
    """A grid of boxes; forward takes the wanted grid and is the loss, which picks cells with an object by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1), nn.LeakyReLU(0.1)),
            nn.Conv2d(WIDTH, 5 + CLASSES, 1),
        )

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        found = self.net(x).permute(0, 2, 3, 1)
        has = grid[..., 4] > 0
        box = F.mse_loss(found[has][:, :4], grid[has][:, :4], reduction="sum")
        kind = F.cross_entropy(found[has][:, 5:], grid[has][:, 5].long(), reduction="sum")
        there = F.binary_cross_entropy_with_logits(found[..., 4], has.to(x.dtype), reduction="sum")
        return (5 * box + kind + there) / len(x)


def grids(n: int, generator: torch.Generator) -> Batch:
    """Images, and for each cell a box, whether there is one, and its class."""
    grid = normal(generator, n, 2, 2, 6)
    grid[..., 4] = ids(generator, 2, n, 2, 2)
    grid[..., 5] = ids(generator, CLASSES, n, 2, 2)
    return (normal(generator, n, 3, 8, 8), grid), None


class RetinaNet(nn.Module):
    """Two levels of features, whose cells are classified; focal loss divided by the positives of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3, 2, 1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.across, self.head = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).relu()
        b = self.second(a).relu()
        a = self.across(a) + F.interpolate(b, scale_factor=2)
        return torch.cat([self.head(each).flatten(2) for each in (a, b)], 2).transpose(1, 2)


def cells(n: int, generator: torch.Generator) -> Batch:
    """Images, and a class or -1 (nothing) for each of their cells."""
    return (normal(generator, n, 3, 8, 8),), ids(generator, CLASSES + 1, n, 20) - 1


def focal(scores: Tensor, target: Tensor) -> Tensor:
    """Over all cells, by the number of positive ones in the batch."""
    wanted = torch.zeros_like(scores)
    there = target >= 0
    wanted[there, target[there]] = 1.0
    chance = scores.sigmoid()
    weight = torch.where(wanted == 1, 0.25 * (1 - chance) ** 2, 0.75 * chance**2)
    each = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    return (weight * each).sum() / there.sum().clamp(min=1)


class Lists(nn.Module):
    """A detector that takes a list of images of several sizes, resizes and pads them, and sums the losses of each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, CLASSES + 4, 3, 2, 1))

    def forward(self, images: Tensor, boxes: Tensor, sizes: Tensor) -> Tensor:
        listed = [image[:, : int(size), : int(size)] for image, size in zip(images, sizes, strict=True)]
        high = max(image.shape[1] for image in listed)
        padded = torch.stack([F.pad(each, (0, high - each.shape[2], 0, high - each.shape[1])) for each in listed])
        losses = []
        for found, wanted in zip(self.net(padded), boxes, strict=True):
            grid = found.flatten(1).t()
            own = grid[(grid[:, :4] - wanted).pow(2).sum(1).argmin()]
            losses.append(F.smooth_l1_loss(own[:4], wanted) + own[4:].logsumexp(0) - own[4])
        return torch.stack(losses).mean()


def listed(n: int, generator: torch.Generator) -> Batch:
    """Images of at most 12 x 12, a box for each, and their sizes; one of each batch has the largest."""
    sizes = 8 + 4 * ids(generator, 2, n)
    return (normal(generator, n, 3, 12, 12), normal(generator, n, 4), sizes), None


class Experts(nn.Module):
    """A mixture: each example or token goes to its best experts."""

    def __init__(self, number: int, capacity: bool = False) -> None:
        super().__init__()
        self.number, self.capacity = number, capacity
        self.start, self.gate = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(x).relu()
        chance = self.gate(x).softmax(-1)
        weight, chosen = chance.topk(self.number, -1)
        result = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            row, place = torch.where(chosen == k)
            if len(row):
                result = result.index_add(0, row, expert(x[row]) * weight[row, place].unsqueeze(1))
        share = F.one_hot(chosen[:, 0], 4).to(x.dtype).mean(0)
        return self.head(x + result), 4 * (share * chance.mean(0)).sum()


def balanced(found: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy, and a loss that balances the experts over the batch."""
    return F.cross_entropy(found[0], target) + 0.01 * found[1]


def features(n: int, generator: torch.Generator) -> Batch:
    """Vectors and classes."""
    return (normal(generator, n, 4),), ids(generator, CLASSES, n)


class Points(nn.Module):
    """A cloud of points, turned by a learnt matrix, and a maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(
            nn.Conv1d(3, WIDTH, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(WIDTH, 9)
        )
        self.net = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turn = self.turn(x).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        return self.head(self.net(turn @ x).max(2).values), turn


def turned(found: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy, and how far the matrix is from a rotation."""
    scores, turn = found
    far = torch.bmm(turn, turn.transpose(1, 2)) - torch.eye(3, dtype=turn.dtype)
    return F.cross_entropy(scores, target) + 1e-3 * far.norm(dim=(1, 2)).mean()


def clouds(n: int, generator: torch.Generator) -> Batch:
    """Points and classes."""
    return (normal(generator, n, 3, 10),), ids(generator, CLASSES, n)


MODELS = {
    "unet_dice": Paper("Ronneberger, Fischer, Brox, U-Net, 2015", Unet, masks, dice),
    "vnet_dice": Paper("Milletari, Navab, Ahmadi, V-Net, 2016", VNet, masks, dice_of_each),
    "yolo": Paper("Redmon et al., You Only Look Once, 2016", Yolo, grids),
    "retinanet": Paper("Lin et al., Focal Loss for Dense Object Detection, 2017", RetinaNet, cells, focal),
    "faster_rcnn_lists": Paper("Ren et al., Faster R-CNN, 2015 (lists of images)", Lists, listed),
    "top2_experts": Paper(
        "Shazeer et al., Outrageously Large Neural Networks, 2017", lambda: Experts(2), features, balanced
    ),
    "switch": Paper("Fedus, Zoph, Shazeer, Switch Transformers, 2022", lambda: Experts(1), features, balanced),
    "pointnet": Paper("Qi et al., PointNet, 2017", Points, clouds, turned),
}
