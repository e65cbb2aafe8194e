"""Models with code that cannot be traced: each becomes a region, or several."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES = 6, 3


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


def sign(x: Tensor) -> Tensor:
    made: Tensor = Sign.apply(x)  # type: ignore[no-untyped-call]
    return made


kept_sign = Sign.apply  # bound before any trace, as in libraries that give it a name of its own


class KeptSign(nn.Module):
    """A custom Function of which the module knows only its `apply`."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = kept_sign(x)  # type: ignore[no-untyped-call]
        return made


class BinaryConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, sign(self.conv.weight), self.conv.bias, padding=1)


class BinaryNet(nn.Module):
    """A convolutional network with a custom Function in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.binary = BinaryConv(4, 4)
        self.norm = nn.Flatten()
        self.fc = nn.Linear(4 * 16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        return self.out(F.relu(self.fc(self.norm(self.binary(x)))))


class Gated(nn.Module):
    """A branch on `.item()`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)
        self.gate = nn.Parameter(torch.tensor(1.0))
        self.scale = torch.full((FEATURES,), 2.0)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.fc(x) * self.scale if self.gate.item() > 0 else x


class Rows(nn.Module):
    """A loop over rows, with a branch on the data of each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row) if row.sum().item() > 0 else row * 2 for row in x])


@dataclass
class Pair:
    left: Tensor
    sums: tuple[Tensor, None]


class Outputs(nn.Module):
    """Returns a dict with a tensor and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = sign(self.fc(x))
        return {"y": y, "pair": Pair(x * 2, (y.sum(1), None))}


class Wrapped(nn.Module):
    """Returns a dataclass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Pair:
        y = sign(self.fc(x))
        return Pair(y * x, (y.sum(1), None))


class Normed(nn.Module):
    """A BatchNorm and a custom Function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(sign(self.norm(x)) * x)


def _doubled(x: Tensor) -> Tensor:
    return x * 2 if x.dim() < 9 else x


def _by_sum(x: Tensor) -> Tensor:
    return x * 2 if float(x.sum()) < 1e9 else x


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted, scripted_by_sum = torch.jit.script(_doubled), torch.jit.script(_by_sum)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _scripted(x)


class Vectorised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * self.weight)(x)


class Experts(nn.Module):
    """A mixture of experts, some of which no example reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 5)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).topk(2)
        made = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == k)
            made = made.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return made


class Force(nn.Module):
    """A gradient that forward takes, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.fc(at).tanh().sum(), at, create_graph=True)
        return x + force


class Perceptron(nn.Module):
    """Linear layers around other modules."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.ModuleList(middle)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for module in self.middle:
            x = module(x)
            if isinstance(x, Pair):
                x = x.left + x.sums[0][:, None]
            if isinstance(x, dict):
                x = x["y"] + x["pair"].left * x["pair"].sums[0][:, None]
        return self.last(x)


class Tied(Perceptron):
    """The weight inside a region is that of a layer outside."""

    def __init__(self) -> None:
        super().__init__(Gated())
        region: Any = self.middle[0]
        region.fc.weight = self.first.weight


class Whole(nn.Module):
    """A model whose own forward reads data."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES))
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.rand(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale
        return x @ self.weight * (2.0 if self.weight.sum().item() > 0 else 3.0)


def finite_loss(output: Tensor, target: Tensor) -> Tensor:
    assert output.isfinite().all().item()
    return F.mse_loss(output, F.one_hot(target, CLASSES).to(output.dtype))


class FiniteLoss(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return finite_loss(output * self.scale, target)


def gated() -> nn.Module:
    """A factory that scripts can import."""
    return Perceptron(Gated())


class Noisy(nn.Module):
    """Draws for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(sign(self.drop(self.fc(x))) * x) + torch.rand_like(x)


class SequenceFirst(nn.Module):
    """Drops out with the batch in dim 1; one number for the whole batch says whether another dropout comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.4:
            x = F.dropout(x, 0.2)
        y = self.fc(x).unflatten(1, (2, -1)).transpose(0, 1)
        return F.dropout(y, 0.5, self.training).transpose(0, 1).flatten(1)


class Frozen(nn.Module):
    """A BatchNorm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).eval()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + sign(self.norm(x))


class Single(nn.Module):
    """Computes in float32 inside, and returns the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.3, 1.1, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.float().sin().to(x.dtype) + 0 * sign(x)


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return sign(x) * x * (1 + 0.1 * self.calls)


class Several(nn.Module):
    """Takes a tuple and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], scale: float = 1.0) -> Tensor:
        return sign(self.fc(pair[0])) * pair[1]["by"] * scale


class Calling(Perceptron):
    """Calls a region twice, with nested arguments, and once without gradient."""

    def __init__(self) -> None:
        super().__init__(Several(), Gated())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        several, gated = self.middle
        x = several((gated(x), {"by": gated(x)}), scale=2.0)
        with torch.no_grad():
            again = gated(x)
        return self.last(x + again)


class Shared(nn.Module):
    """Calls a region on values of several widths, and with a second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 4 * FEATURES)
        self.last = nn.Linear(2 * FEATURES, CLASSES)
        self.sign = KeptSign()

    def forward(self, x: Tensor) -> Tensor:
        x = self.sign(self.first(x))
        x = self.sign(self.wide(x)).unflatten(1, (2, 2 * FEATURES))
        return self.last(self.sign(x * 0.5).mean(1))


def _doubled_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 2,)


def hooked() -> nn.Module:
    """A module with a backward hook."""
    model = Perceptron(nn.Linear(FEATURES, FEATURES))
    model.middle[0].register_full_backward_hook(_doubled_gradient)
    return model


class Dropped(nn.Module):
    """Left out by chance, as LayerDrop does, with a dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        if self.training and float(torch.rand(1)) < 0.3:
            return -x
        return self.drop(self.fc(x))
