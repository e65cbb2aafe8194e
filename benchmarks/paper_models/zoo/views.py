"""Self-supervised and metric learning: two views or modalities, losses over the batch, moving averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

WIDTH, CLASSES = 12, 3


def encoder() -> nn.Sequential:
    """Images of 8 x 8 to vectors."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, WIDTH, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def mlp(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Sequential:
    """A projection head or predictor."""
    return nn.Sequential(nn.Linear(inputs, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, outputs))


def two_views(n: int, generator: torch.Generator) -> Batch:
    """An image seen twice."""
    x = normal(generator, n, 3, 8, 8)
    return (x + 0.2 * normal(generator, n, 3, 8, 8), x + 0.2 * normal(generator, n, 3, 8, 8)), None


def labelled(n: int, generator: torch.Generator) -> Batch:
    """Images with their classes."""
    return (normal(generator, n, 3, 8, 8),), ids(generator, CLASSES, n)


def labelled_views(n: int, generator: torch.Generator) -> Batch:
    """An image seen twice, with its class."""
    return two_views(n, generator)[0], ids(generator, CLASSES, n)


# -- contrastive -------------------------------------------------------------------------------------------------------


class Projected(nn.Module):
    """An encoder and a projection of both views."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) if norm else mlp()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.encoder(x)), self.head(self.encoder(y))


class Concatenated(Projected):
    """Both views in one batch of twice the size, and one result."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.normalize(self.head(self.encoder(torch.cat([x, y]))), dim=1)


def nt_xent(f: Tensor) -> Tensor:
    """SimCLR's loss of concatenated views."""
    n = f.size(0) // 2
    similar = (f @ f.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def barlow(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-correlation of views normalised over the batch, against the identity."""
    a, b = ((each - each.mean(0)) / (each.std(0) + 1e-3) for each in pair)
    c = a.T @ b / a.size(0)
    off = c.flatten()[:-1].view(WIDTH - 1, WIDTH + 1)[:, 1:].flatten()
    return (torch.diagonal(c) - 1).pow(2).sum() + 0.005 * off.pow(2).sum()


def vicreg(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Invariance, variance and covariance."""
    total = 25 * F.mse_loss(*pair)
    for each in pair:
        centred = each - each.mean(0)
        covariance = centred.T @ centred / (each.size(0) - 1)
        off = covariance - torch.diag(torch.diagonal(covariance))
        total = total + F.relu(1 - torch.sqrt(each.var(0) + 1e-4)).mean() + off.pow(2).sum() / WIDTH
    return total


class SupCon(Concatenated):
    """Views stacked as (n, 2, width), as its loss takes them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(super().forward(x, y).chunk(2), 1)


def sup_con(f: Tensor, target: Tensor) -> Tensor:
    """All examples of the same class are positives."""
    n, views = f.shape[:2]
    same = (target.view(-1, 1) == target.view(1, -1)).to(f.dtype).repeat(views, views)
    f = torch.cat(torch.unbind(f, 1))
    logits = f @ f.T / 0.5
    logits = logits - logits.max(1, keepdim=True).values.detach()
    others = torch.ones_like(same).scatter_(1, torch.arange(n * views).view(-1, 1), 0)
    chance = logits - ((logits.exp() * others).sum(1, keepdim=True)).log()
    return -((same * others * chance).sum(1) / (same * others).sum(1)).view(views, n).mean()


class Clip(nn.Module):
    """Images and texts; the temperature is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = encoder(), nn.Embedding(20, WIDTH)
        self.text, self.scale = mlp(), nn.Parameter(torch.tensor(0.7))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(self.table(text).mean(1)), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        return logits, logits.t()


def clip_loss(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Each image finds its text, and each text its image."""
    same = torch.arange(pair[0].shape[0])
    return (F.cross_entropy(pair[0], same) + F.cross_entropy(pair[1], same)) / 2


# -- triplets and margins ----------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Normalised vectors of as many images as are given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, *images: Tensor) -> Any:
        found = tuple(F.normalize(self.encoder(each), dim=-1) for each in images)
        return found if len(found) > 1 else found[0]


class Triplet(nn.Module):
    """Anchor, positive and negative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedded()

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Any:
        return self.embed(anchor, positive, negative)


def three(n: int, generator: torch.Generator) -> Batch:
    """Two images that are alike, and another one."""
    return (*two_views(n, generator)[0], normal(generator, n, 3, 8, 8)), None


def triplet(found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Of the output alone."""
    return F.triplet_margin_loss(*found, margin=0.2)


def batch_hard(f: Tensor, target: Tensor) -> Tensor:
    """The farthest positive and the nearest negative of the batch."""
    far = torch.cdist(f, f)
    same = target[:, None] == target[None, :]
    positive = far.masked_fill(~same, float("-inf")).max(1).values
    negative = far.masked_fill(same, 1e6).min(1).values
    return F.softplus(positive - negative).mean()


class Margin(nn.Module):
    """Cosines to class centres, of which the own one is made harder; forward takes the labels and returns the loss."""

    def __init__(self, arc: bool) -> None:
        super().__init__()
        self.encoder, self.arc = encoder(), arc
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.encoder(x)), F.normalize(self.weight))
        index = torch.where(label != -1)[0]
        own = cosine[index, label[index]]
        harder = torch.cos(torch.acos(own.clamp(-0.999, 0.999)) + 0.3) if self.arc else own - 0.3
        cosine = cosine.clone()
        cosine[index, label[index]] = harder
        return F.cross_entropy(8 * cosine, label)


# -- moving averages ---------------------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """A network and its moving average, which sees the other view."""

    queue: Tensor

    def __init__(self, predicts: bool = True, queue: bool = False) -> None:
        super().__init__()
        self.online = nn.Sequential(encoder(), mlp())
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = mlp() if predicts else nn.Identity()
        if queue:
            self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 16), dim=0))

    @torch.no_grad()
    def move(self) -> None:
        """Move the average towards the network."""
        for own, moving in zip(self.online.parameters(), self.target.parameters(), strict=True):
            moving.data = moving.data * 0.99 + own.data * 0.01

    def both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The network's prediction of a view, and the average's projection of the other."""
        if self.training:
            self.move()
        with torch.no_grad():
            keys = self.target(y)
        return self.predictor(self.online(x)), keys


class Byol(Averaged):
    """Both views predict each other."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        if self.training:
            self.move()
        with torch.no_grad():
            keys = self.target(y), self.target(x)
        return self.predictor(self.online(x)), keys[0].detach(), self.predictor(self.online(y)), keys[1].detach()


def byol(found: tuple[Tensor, ...]) -> Tensor:
    """2 - 2 cos, of both pairs."""
    a, b, c, d = (F.normalize(each, dim=-1) for each in found)
    return (4 - 2 * (a * b).sum(-1) - 2 * (c * d).sum(-1)).mean()


class MocoV3(Averaged):
    """Keys of the batch are the negatives."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = self.both(x, y)
        return F.normalize(q, dim=1) @ F.normalize(k, dim=1).t() / 0.2


def moco_v3(logits: Tensor) -> Tensor:
    """Of the output alone."""
    return F.cross_entropy(logits, torch.arange(logits.size(0))) * 0.4


class Moco(Averaged):
    """Keys of earlier batches are the negatives, in a queue."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (F.normalize(each, dim=1) for each in self.both(x, y))
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
        if self.training:
            self.queue = torch.cat([k.t(), self.queue], 1)[:, : self.queue.size(1)]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class SimSiam(Projected):
    """The same network for both, and no gradient on one side."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.predictor = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        a, b = super().forward(x, y)
        return self.predictor(a), self.predictor(b), a.detach(), b.detach()


def simsiam(found: tuple[Tensor, ...]) -> Tensor:
    """Negative cosines."""
    p, q, a, b = found
    return -(F.cosine_similarity(p, b).mean() + F.cosine_similarity(q, a).mean()) * 0.5


class Dino(Averaged):
    """A teacher whose outputs are centred by a moving average of the batch's mean."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__(predicts=False)
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        student, teacher = self.both(x, y)
        chance = F.softmax((teacher - self.centre) / 0.4, -1)
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(teacher.mean(0, keepdim=True) * 0.1)
        return -(chance * F.log_softmax(student / 0.5, -1)).sum(-1).mean()


class MeanTeacher(nn.Module):
    """A student of labels and of its own moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(encoder(), nn.Dropout(0.2), nn.Linear(WIDTH, CLASSES))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.training:
            with torch.no_grad():
                for own, moving in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    moving.mul_(0.95).add_(own, alpha=0.05)
        with torch.no_grad():
            other = self.teacher(y)
        return {"student": self.student(x), "teacher": other}


def mean_teacher(found: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy and consistency."""
    return F.cross_entropy(found["student"], target) + 3 * F.mse_loss(
        found["student"].softmax(1), found["teacher"].softmax(1)
    )


def image_text(n: int, generator: torch.Generator) -> Batch:
    """Images and tokens."""
    return (normal(generator, n, 3, 8, 8), ids(generator, 20, n, 5)), None


def _margin(n: int, generator: torch.Generator) -> Batch:
    (x,), label = labelled(n, generator)
    assert label is not None
    return (x, label), None


_VIEWS: dict[str, tuple[str, Callable[[], nn.Module], Any]] = {
    "simclr": ("Chen et al., A Simple Framework for Contrastive Learning, 2020", Concatenated, nt_xent),
    "barlow_twins": ("Zbontar et al., Barlow Twins, 2021", Projected, barlow),
    "vicreg": ("Bardes, Ponce, LeCun, VICReg, 2022", Projected, vicreg),
    "byol": ("Grill et al., Bootstrap Your Own Latent, 2020", Byol, byol),
    "moco": (
        "He et al., Momentum Contrast, 2020",
        lambda: Moco(predicts=False, queue=True),
        None,
    ),
    "moco_v3": ("Chen, Xie, He, Training Self-Supervised Vision Transformers, 2021", MocoV3, moco_v3),
    "simsiam": ("Chen, He, Exploring Simple Siamese Representation Learning, 2021", SimSiam, simsiam),
    "dino": ("Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021", Dino, None),
}

MODELS = {
    **{name: Paper(source, make, two_views, loss) for name, (source, make, loss) in _VIEWS.items()},
    "supcon": Paper("Khosla et al., Supervised Contrastive Learning, 2020", SupCon, labelled_views, sup_con),
    "clip": Paper("Radford et al., Learning Transferable Visual Models, 2021", Clip, image_text, clip_loss),
    "mean_teacher": Paper(
        "Tarvainen, Valpola, Mean Teachers are Better Role Models, 2017", MeanTeacher, labelled_views, mean_teacher
    ),
    "facenet_triplet": Paper("Schroff, Kalenichenko, Philbin, FaceNet, 2015", Triplet, three, triplet),
    "batch_hard_triplet": Paper(
        "Hermans, Beyer, Leibe, In Defense of the Triplet Loss, 2017", Embedded, labelled, batch_hard
    ),
    "arcface": Paper("Deng et al., ArcFace, 2019", lambda: Margin(True), _margin),
    "cosface": Paper("Wang et al., CosFace, 2018", lambda: Margin(False), _margin),
}
