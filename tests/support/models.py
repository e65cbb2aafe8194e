"""Small models that tests share: one of each kind that splitc must capture, with a batch and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 4
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """Functions that make a model, its example and its target; loss None: the model returns it."""

    model: Callable[[], nn.Module]
    example: Callable[[], Any]
    target: Callable[[], Any] | None = None
    loss: Any = None

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Any, Any]:
        """model, example, target, loss."""
        model = self.model().to(dtype)
        return (
            model,
            cast(self.example(), dtype),
            None if self.target is None else cast(self.target(), dtype),
            self.loss,
        )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every float tensor in `dtype`."""
    if isinstance(value, dict):
        return {name: cast(part, dtype) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def images(size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, 3, size, size)


def vectors(width: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, width)


def sequences(length: int = 6, width: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, length, width)


def tokens(length: int = 6, vocabulary: int = 11) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (BATCH, length))


def labels(classes: int = CLASSES) -> Callable[[], Tensor]:
    return lambda: torch.randint(classes, (BATCH,))


class Made(nn.Module):
    """A model of the given children whose forward is `run(model, *inputs)`."""

    def __init__(self, run: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


class SmallVGG(nn.Module):
    """BatchNorm, max-pools, dropout, and a head that holds most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(24, 32),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(32, 32),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(32, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images)
        x = torch.flatten(x, 1)
        return self.classifier(x)


class SmallAlexNet(nn.Module):
    """Large strides, adaptive pooling, dropout before each linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, kernel_size=5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=3, padding=1, groups=2)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.fc6 = nn.Linear(32, 24)
        self.fc7 = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, stride=2)
        x = self.avgpool(F.relu(self.conv2(x)))
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc6(F.dropout(x, 0.5, self.training)))
        return self.fc7(F.dropout(x, training=self.training))


class Block(nn.Module):
    """Two convolutions beside a shortcut, added in place."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(before, after, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class SmallResNet(nn.Module):
    """A stem, two blocks with skip connections, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = Block(4, 4, 1)
        self.layer2 = Block(4, 6, 2)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape
        x = F.relu(self.conv1(x))
        x = self.layer2(self.layer1(x))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(x.reshape(B, 6)) * (H / W)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES))


def frozen_trunk() -> nn.Module:
    model = SmallVGG()
    model.features.requires_grad_(False)
    return model


class Attention(nn.Module):
    """Causal self-attention by hand, with a mask that is no part of the state."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.heads = heads
        self.bias: Tensor
        self.register_buffer(
            "bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class LanguageModel(nn.Module):
    """Position embeddings, a transformer block, and a head tied to the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8, length: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, 2, length)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(x)
        return self.lm_head(x)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=0)


class Recurrent(nn.Module):
    """An LSTM, its last state, and a GRU over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x)
        _, last = self.gru(out)
        return self.fc(torch.cat([last[0], last[1], h[-1] + c[-1]], dim=1))


class Encoder(nn.Module):
    """torch's own transformer layers, with a causal mask, dropout inside the attention, and padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        return self.fc(self.encoder(x, mask=mask, src_key_padding_mask=padding).mean(1))


def padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(BATCH, 6)
    padding[1, 4:] = float("-inf")
    return torch.randn(BATCH, 6, 8), padding


class Functional(nn.Module):
    """Parameters of its own, in lists and dicts, and buffers, used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.scales = nn.ParameterDict({"left": nn.Parameter(torch.ones(8)), "right": nn.Parameter(torch.ones(8))})
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(8))
        self.head = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight) + self.shift)
        x = x * self.scales["left"] + x.flip(1) * self.scales["right"]
        return x @ self.head.t() / self.temperature.exp()


class Branches(nn.Module):
    """Two inputs, branches of different depth, a layer that runs twice, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.shared = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.shared(F.relu(self.left(x))), self.shared(self.right(y))
        g = torch.sigmoid(self.gate(a))
        return self.fc(torch.cat([g * a, (1 - g) * b], dim=1))


class Options(nn.Module):
    """Keyword-only inputs, defaults, and a dict of outputs of which the loss reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, CLASSES)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 2.0, bias: Tensor | None = None) -> dict[str, Tensor]:
        x = x * mask if bias is None else x + bias
        return {"hidden": self.unused(x), "logits": self.fc(x) * scale}


class OwnLoss(nn.Module):
    """The model returns its loss: cross entropy, an auxiliary head, and a penalty on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.fc = nn.Linear(8, CLASSES)
        self.aux = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        hidden = F.relu(self.body(x))
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        loss = F.cross_entropy(self.fc(hidden), labels) + 0.3 * F.mse_loss(self.aux(hidden), targets)
        return loss + 1e-3 * penalty


def made(run: Callable[..., Any], **children: Any) -> Any:
    """A model whose forward is `run`, with linear layers `a` (8 -> 8) and `fc` (8 -> CLASSES)."""
    return Made(run, **{"a": nn.Linear(8, 8), "fc": nn.Linear(8, CLASSES), **children})


CASES: dict[str, Case] = {
    "vgg": Case(SmallVGG, images(), labels(), F.cross_entropy),
    "alexnet": Case(SmallAlexNet, images(16), labels(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "mlp": Case(mlp, vectors(), labels(), F.cross_entropy),
    "resnet": Case(SmallResNet, images(), labels(), F.cross_entropy),
    "frozen_trunk": Case(frozen_trunk, images(), labels(), F.cross_entropy),
    "language_model": Case(LanguageModel, tokens(), tokens(), token_loss),
    "recurrent": Case(Recurrent, sequences(), labels(), F.cross_entropy),
    "encoder": Case(lambda: Encoder(0.0), padded, labels(), F.cross_entropy),
    "functional": Case(Functional, vectors(), labels(), F.cross_entropy),
    "branches": Case(Branches, lambda: (torch.randn(BATCH, 8), torch.randn(BATCH, 6)), labels(), F.cross_entropy),
    "options": Case(
        Options,
        lambda: {"x": torch.randn(BATCH, 8), "mask": torch.rand(BATCH, 1)},
        labels(),
        lambda out, y: F.cross_entropy(out["logits"], y),
    ),
    "own_loss": Case(
        OwnLoss, lambda: {"x": torch.randn(BATCH, 8), "labels": labels()(), "targets": torch.randn(BATCH, 3)}
    ),
}
"""Name -> a model that every strategy must be able to train."""
