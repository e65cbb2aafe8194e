"""A small language model with a large vocabulary: parameters at both ends, FLOPs at one end.

The embedding and the output projection hold 16.4 M of the 19.6 M parameters: two tables of 32,000
tokens.  The embedding looks rows up and has no FLOPs; the projection has seven tenths of the
FLOPs; four blocks of 0.8 M lie between them.  Data parallelism all-reduces both tables in every
step.  `dataset` is real text, Python's own library.

    splitc inspect examples/transformer.py --world 4 --cluster v100-10gbe
    splitc compile examples/transformer.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/transformer.py --world 4 --input 2
    splitc run build --steps 200 --data examples.transformer:dataset
"""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """Causal attention and a perceptron, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        """Every position attends to itself and to earlier ones."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Tokens (batch, time) -> logits of the next token (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, time: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.head.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformer(
    vocabulary: int = 32_000, width: int = 256, depth: int = 4, heads: int = 4, time: int = 128, tied: bool = False
) -> nn.Module:
    """A decoder of `depth` blocks for up to `time` tokens.  tied: the head is the embedding's weight."""
    return Transformer(vocabulary, width, depth, heads, time, tied)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of all tokens (batch, time), without those that are padding (-100)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = transformer
loss = next_token_loss


def example(batch: int = 16, time: int = 128, vocabulary: int = 32_000) -> tuple[Tensor]:
    """One rank's batch of token sequences."""
    return (torch.randint(vocabulary, (batch, time)),)


def target(batch: int = 16, time: int = 128, vocabulary: int = 32_000) -> Tensor:
    """The token that follows each of them."""
    return torch.randint(vocabulary, (batch, time))


def dataset(worker: object = None, time: int = 128, vocabulary: int = 32_000) -> TensorDataset:
    """Python's library: its most frequent words and signs as tokens, 0 for others, and the token after each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(r"\w+|[^\w ]| +", "".join(file.read_text(errors="ignore") for file in files))
    known = {word: k for k, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), start=1)}
    tokens = torch.tensor([known.get(word, 0) for word in words])
    sequences = tokens[: len(tokens) // time * time + 1]
    return TensorDataset(sequences[:-1].view(-1, time), sequences[1:].view(-1, time))
