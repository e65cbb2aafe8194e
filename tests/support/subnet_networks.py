"""Networks with hidden layers for independent subnets: as modules, and by masks on whole weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.subnets import Masks, Network, Weights, linear, norm, of_linear, of_norm

INPUTS, CLASSES = 5, 4


class Chain(nn.Module):
    """Hidden layers of `widths`, each with a normalisation, and a linear layer."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(
            nn.Linear(before, after, bias=bias) for before, after in zip((INPUTS, *widths), widths, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.head = nn.Linear(widths[-1], CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for hidden, normalise in zip(self.hidden, self.norms, strict=True):
            x = torch.relu(normalise(hidden(x)))
        scores: Tensor = self.head(x)
        return scores


def chain(*widths: int, bias: bool = True) -> Network:
    """Layers h0, h1, ..., one after the other."""

    def masked(w: Weights, x: Tensor, m: Masks) -> Tensor:
        for k in range(len(widths)):
            x = m[f"h{k}"] * torch.relu(norm(w, f"norms.{k}", linear(w, f"hidden.{k}", x)))
        return linear(w, "head", x)

    axes = of_linear("head", columns=[f"h{len(widths) - 1}"])
    for k in range(len(widths)):
        axes |= of_linear(f"hidden.{k}", [f"h{k}"], [f"h{k - 1}"] if k else []) | of_norm(f"norms.{k}", f"h{k}")
    model = Chain(*widths, bias=bias)
    return Network(model, masked, {name: axes[name] for name, _ in model.named_parameters() if name in axes})


class Residual(nn.Module):
    """Two hidden layers whose sum is read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, CLASSES)
        self.norm_a, self.norm_b = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm_a(self.a(x)))
        scores: Tensor = self.head(x + torch.tanh(self.norm_b(self.b(x))))
        return scores


def residual(width: int) -> Network:
    """One layer of neurons, h, whose two activations are added."""

    def masked(w: Weights, x: Tensor, m: Masks) -> Tensor:
        x = m["h"] * torch.relu(norm(w, "norm_a", linear(w, "a", x)))
        return linear(w, "head", x + m["h"] * torch.tanh(norm(w, "norm_b", linear(w, "b", x))))

    axes = of_linear("a", ["h"]) | of_linear("b", ["h"], ["h"]) | of_linear("head", columns=["h"])
    return Network(Residual(width), masked, axes | of_norm("norm_a", "h") | of_norm("norm_b", "h"))


class Joined(nn.Module):
    """Two hidden layers beside each other and the inputs, concatenated, then a third."""

    def __init__(self, left: int, right: int, top: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(INPUTS, left), nn.Linear(INPUTS, right)
        self.top, self.head = nn.Linear(left + INPUTS + right, top), nn.Linear(top + left, CLASSES)
        self.norm_left, self.norm_right, self.norm_top = map(nn.BatchNorm1d, (left, right, top))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(self.norm_left(self.left(x))), torch.tanh(self.norm_right(self.right(x)))
        top = torch.relu(self.norm_top(self.top(torch.cat([left, x, right], 1))))
        scores: Tensor = self.head(torch.cat([top, left], 1))
        return scores


def joined(left: int, right: int, top: int) -> Network:
    """Layers left, right and top."""

    def masked(w: Weights, x: Tensor, m: Masks) -> Tensor:
        left = m["left"] * torch.relu(norm(w, "norm_left", linear(w, "left", x)))
        right = m["right"] * torch.tanh(norm(w, "norm_right", linear(w, "right", x)))
        top = m["top"] * torch.relu(norm(w, "norm_top", linear(w, "top", torch.cat([left, x, right], 1))))
        return linear(w, "head", torch.cat([top, left], 1))

    axes = of_linear("top", ["top"], ["left", INPUTS, "right"]) | of_linear("head", columns=["top", "left"])
    for name in ("left", "right"):
        axes |= of_linear(name, [name])
    for name in ("left", "right", "top"):
        axes |= of_norm(f"norm_{name}", name)
    return Network(Joined(left, right, top), masked, axes)


class Skipped(nn.Module):
    """A hidden layer, concatenated with the inputs before the last layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width + INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([torch.relu(self.norm(self.first(x))), x], 1))
        return scores


def skipped(width: int) -> Network:
    """One layer, h; a part of the last weight is no layer's, and so all sites have it."""

    def masked(w: Weights, x: Tensor, m: Masks) -> Tensor:
        hidden = m["h"] * torch.relu(norm(w, "norm", linear(w, "first", x)))
        return linear(w, "head", torch.cat([hidden, x], 1))

    axes = of_linear("first", ["h"]) | of_norm("norm", "h") | of_linear("head", columns=["h", INPUTS])
    return Network(Skipped(width), masked, axes)


class Normed(nn.Module):
    """Hidden features and the inputs, concatenated before one normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, width), nn.BatchNorm1d(width + INPUTS)
        self.head = nn.Linear(width + INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(torch.cat([self.first(x), x], 1))))
        return scores


def normed(width: int) -> Network:
    """One layer, h; a part of the normalisation is no layer's, and so all sites have it."""

    def masked(w: Weights, x: Tensor, m: Masks) -> Tensor:
        whole = torch.relu(norm(w, "norm", torch.cat([linear(w, "first", x), x], 1)))
        return linear(w, "head", torch.cat([m["h"] * whole[:, :width], whole[:, width:]], 1))

    axes = of_linear("first", ["h"]) | of_linear("head", columns=["h", INPUTS])
    axes |= {"norm.weight": (("h", INPUTS),), "norm.bias": (("h", INPUTS),)}
    return Network(Normed(width), masked, axes)
