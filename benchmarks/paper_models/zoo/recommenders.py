"""Recommenders and word vectors: tables of several sizes, sparse gradients, bags, negatives of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

SIZES, WIDTH = (5, 40, 12), 8
USERS, ITEMS = 30, 25


def clicks(n: int, generator: torch.Generator) -> Batch:
    """Dense features, an id of each table in one tensor, and clicks."""
    columns = torch.stack([ids(generator, size, n) for size in SIZES], 1)
    return (normal(generator, n, 4), columns), ids(generator, 2, n).double()


class Dlrm(nn.Module):
    """Products of all pairs of embeddings."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum", sparse=True) for size in SIZES)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        fields = len(SIZES) + 1
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(WIDTH + fields * (fields - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        fields = torch.stack([x, *(table(sparse[:, k : k + 1]) for k, table in enumerate(self.tables))], 1)
        products = torch.bmm(fields, fields.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


class WideAndDeep(nn.Module):
    """A linear model of ids beside a deep one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(size, 1) for size in SIZES)
        self.deep = nn.ModuleList(nn.Embedding(size, WIDTH) for size in SIZES)
        self.mlp = nn.Sequential(nn.Linear(4 + len(SIZES) * WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        columns = sparse.unbind(1)
        wide = sum(table(column) for table, column in zip(self.wide, columns, strict=True))
        deep = torch.cat([dense, *(table(column) for table, column in zip(self.deep, columns, strict=True))], 1)
        return (wide + self.mlp(deep)).squeeze(1)


class DeepFm(nn.Module):
    """Factorisation machine and network of the same embeddings, in one table with offsets."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Embedding(sum(SIZES), 1), nn.Embedding(sum(SIZES), WIDTH)
        self.register_buffer("offsets", torch.tensor([0, *SIZES[:-1]]).cumsum(0))
        self.mlp = nn.Sequential(nn.Linear(len(SIZES) * WIDTH + 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        sparse = sparse + self.offsets
        x = self.table(sparse)
        pairs = 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(1, keepdim=True)
        deep = self.mlp(torch.cat([dense, x.flatten(1)], 1))
        return (self.linear(sparse).sum(1) + pairs + deep).squeeze(1)


class Factors(nn.Module):
    """Users and items; the scores of an item that is liked and of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH, sparse=True), nn.Embedding(ITEMS, WIDTH, sparse=True)

    def forward(self, user: Tensor, liked: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        u = self.users(user)
        return (u * self.items(liked)).sum(1), (u * self.items(other)).sum(1)


def three(n: int, generator: torch.Generator) -> Batch:
    """A user, an item and another."""
    return (ids(generator, USERS, n), ids(generator, ITEMS, n), ids(generator, ITEMS, n)), None


def bpr(pair: tuple[Tensor, Tensor]) -> Tensor:
    """The liked one is to be higher."""
    return -F.logsigmoid(pair[0] - pair[1]).mean()


class Towers(nn.Module):
    """A tower for users and one for items; the other items of the batch are negatives, corrected by their frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.user, self.item = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, user: Tensor, item: Tensor, frequency: Tensor) -> Tensor:
        u, v = F.normalize(self.user(self.users(user)), dim=1), F.normalize(self.item(self.items(item)), dim=1)
        return u @ v.T / 0.3 - torch.log(frequency)


def in_batch(scores: Tensor) -> Tensor:
    """Each user's own item among those of the batch."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


def visits(n: int, generator: torch.Generator) -> Batch:
    """A user, an item, and how often that is seen."""
    frequency = torch.rand(n, dtype=torch.float64, generator=generator) + 0.1
    return (ids(generator, USERS, n), ids(generator, ITEMS, n), frequency), None


class NeuMf(nn.Module):
    """Factors and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(size, 2 * WIDTH) for size in (USERS, ITEMS))
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, pair: Tensor) -> Tensor:
        (a, b), (c, d) = (each.chunk(2, 1) for each in (self.users(pair[:, 0]), self.items(pair[:, 1])))
        return self.head(torch.cat([a * c, self.mlp(torch.cat([b, d], 1))], 1)).squeeze(1)


def rated(n: int, generator: torch.Generator) -> Batch:
    """User and item in one tensor, and whether it is liked."""
    pair = torch.stack([ids(generator, USERS, n), ids(generator, ITEMS, n)], 1)
    return (pair,), ids(generator, 2, n).double()


class SasRec(nn.Module):
    """Self-attention over what a user visited; scores of the next items and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, WIDTH, padding_idx=0)
        self.places, self.drop = nn.Embedding(6, WIDTH), nn.Dropout(0.2)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)
        self.network = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1))

    def forward(self, seen: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        x = self.items(seen) * WIDTH**0.5 + self.places(torch.arange(seen.shape[1]))
        kept = (seen != 0).unsqueeze(-1)
        x = (self.drop(x) * kept).transpose(0, 1)
        mask = ~torch.tril(torch.ones(len(x), len(x), dtype=torch.bool))
        q = self.norms[0](x)
        x = (q + self.attention(q, x, x, attn_mask=mask)[0]).transpose(0, 1)
        x = self.norms[1](x)
        x = self.norms[2]((x + self.network(x.transpose(-1, -2)).transpose(-1, -2)) * kept)
        scores = torch.stack([(x * self.items(each)).sum(-1) for each in (liked, other)])
        index = torch.where(liked != 0)
        first, second = scores[0][index], scores[1][index]
        return F.binary_cross_entropy_with_logits(first, torch.ones_like(first)) + F.binary_cross_entropy_with_logits(
            second, torch.zeros_like(second)
        )


def histories(n: int, generator: torch.Generator) -> Batch:
    """What was seen, padded with 0 in front; what came next; and what did not."""
    seen, liked, other = (ids(generator, ITEMS, n, 6) + 1 for _ in range(3))
    padded = torch.arange(6) < ids(generator, 4, n, 1)
    return tuple(each.masked_fill(padded, 0) for each in (seen, liked, other)), None


class Gru4Rec(nn.Module):
    """The next item of a session; the others' items are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.gru = nn.Embedding(ITEMS, WIDTH, sparse=True), nn.GRU(WIDTH, WIDTH, 2, dropout=0.2)

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        state = self.gru(self.items(seen).transpose(0, 1))[0][-1]
        return state @ self.items(following).t()


def top1(scores: Tensor) -> Tensor:
    """The own item is to be higher than the others', and theirs near zero."""
    own = scores.diag().view(-1, 1)
    return (torch.sigmoid(scores - own) + torch.sigmoid(scores**2)).mean()


def sessions(n: int, generator: torch.Generator) -> Batch:
    """Items seen, and the next one."""
    return (ids(generator, ITEMS, n, 5), ids(generator, ITEMS, n)), None


class SkipGram(nn.Module):
    """Words that stand near each other, and negative samples; forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(60, WIDTH, sparse=True), nn.Embedding(60, WIDTH, sparse=True)

    def forward(self, word: Tensor, near: Tensor, others: Tensor) -> Tensor:
        x = self.inner(word)
        score = (x * self.outer(near)).sum(1)
        negative = torch.bmm(self.outer(others), x.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid(score) + F.logsigmoid(-negative).sum(1)).mean()


def words(n: int, generator: torch.Generator) -> Batch:
    """A word, a neighbour, and four that are none."""
    return (ids(generator, 60, n), ids(generator, 60, n), ids(generator, 60, n, 4)), None


BCE = F.binary_cross_entropy_with_logits
MODELS = {
    "dlrm": Paper("Naumov et al., Deep Learning Recommendation Model, 2019", Dlrm, clicks, BCE),
    "wide_and_deep": Paper(
        "Cheng et al., Wide & Deep Learning for Recommender Systems, 2016", WideAndDeep, clicks, BCE
    ),
    "deepfm": Paper("Guo et al., DeepFM, 2017", DeepFm, clicks, BCE),
    "bpr": Paper("Rendle et al., Bayesian Personalized Ranking, 2009", Factors, three, bpr),
    "two_tower": Paper("Yi et al., Sampling-Bias-Corrected Neural Modeling, 2019", Towers, visits, in_batch),
    "neumf": Paper("He et al., Neural Collaborative Filtering, 2017", NeuMf, rated, BCE),
    "sasrec": Paper("Kang, McAuley, Self-Attentive Sequential Recommendation, 2018", SasRec, histories),
    "gru4rec": Paper("Hidasi et al., Session-based Recommendations with RNNs, 2016", Gru4Rec, sessions, top1),
    "skip_gram": Paper("Mikolov et al., Distributed Representations of Words, 2013", SkipGram, words),
}
