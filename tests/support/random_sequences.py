"""Random models of sequences that come first: (time, batch) tokens and targets, as language models have them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_blocks import VOCABULARY, WIDTH

TIME = 7  # no size of a batch that the tests use with it


class SequenceFirst(nn.Module):
    """Embedding, dropout, recurrent layers or an encoder, and scores of the next token, with a tied weight perhaps."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(choose.choice([0.0, 0.3]))
        self.recurrent = choose.random() < 0.7
        depth = choose.choice([1, 2, 2])
        both = choose.random() < 0.2
        if self.recurrent:
            kind = choose.choice([nn.LSTM, nn.GRU, nn.RNN])
            dropout = choose.choice([0.0, 0.4]) if depth > 1 else 0.0
            width = WIDTH // 2 if both else WIDTH
            self.inner: nn.Module = kind(WIDTH, width, num_layers=depth, dropout=dropout, bidirectional=both)
        else:
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=choose.choice([0.0, 0.2]))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if choose.random() < 0.3:
            self.head.weight = self.table.weight
        self.zeros, self.flat = choose.random() < 0.4, choose.random() < 0.4

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.table(ids))
        if self.recurrent and self.zeros and isinstance(self.inner, nn.GRU):
            layers = self.inner.num_layers * (2 if self.inner.bidirectional else 1)
            start = x.new_zeros(layers, ids.size(1), self.inner.hidden_size)
            x = self.inner(x, start)[0]
        else:
            x = self.inner(x)[0] if self.recurrent else self.inner(x)
        scores = self.head(self.drop(x))
        return scores.view(-1, VOCABULARY) if self.flat else scores

    def batch(self, examples: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Tokens, and those that follow them."""
        ids = torch.randint(VOCABULARY, (TIME + 1, examples), generator=generator)
        return (ids[:-1].clone(),), ids[1:].clone()


def _viewed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.view(-1, VOCABULARY), target.view(-1))


def _of_log_softmax(scores: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(scores, -1).reshape(-1, VOCABULARY), target.reshape(-1))


def _ignoring(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=0)


def sequence_first(choose: random.Random) -> tuple[nn.Module, Any]:
    """A model of sequences first, and its loss."""
    return SequenceFirst(choose), choose.choice([_viewed, _of_log_softmax, _ignoring])
