"""Graphs, whose edges every rank has whole, and bags of tokens given by indices and offsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

FEATURES, WIDTH, CLASSES, NODES = 5, 8, 3, 9


class Gcn(nn.Module):
    """Sums over neighbours, by the roots of their degrees; scores of the nodes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(0.0)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        """What nodes get from those before them."""
        source, goal = edges
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, goal, torch.ones(len(goal), dtype=x.dtype)) + 1
        weight = (degree[source] * degree[goal]).rsqrt()
        return torch.zeros_like(x).index_add(0, goal, x[source] * weight.unsqueeze(1)) + x / degree.unsqueeze(1)

    def forward(self, node: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.spread(self.first(x), edge_index).relu()
        return self.spread(self.second(self.drop(x)), edge_index)[node]


class Sage(nn.Module):
    """A node beside the mean of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * FEATURES, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, node: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        source, goal = edge_index
        for layer in self.layers:
            total = torch.zeros_like(x).index_add_(0, goal, x[source])
            count = torch.zeros(len(x), 1, dtype=x.dtype).index_add_(0, goal, torch.ones(len(goal), 1, dtype=x.dtype))
            x = F.normalize(layer(torch.cat([x, total / count.clamp(min=1)], 1)).relu(), dim=1)
        return self.head(x[node])


class Gat(nn.Module):
    """Attention over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own, self.other = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, node: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.inner(x)
        source, goal = edge_index
        score = F.leaky_relu(self.own(x)[source] + self.other(x)[goal], 0.2).squeeze(1).exp()
        total = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, goal, score) + 1e-9
        weight = score / total[goal]
        return self.head(F.elu(torch.zeros_like(x).index_add(0, goal, weight.unsqueeze(1) * x[source])))[node]


def graph(n: int, generator: torch.Generator) -> Batch:
    """Nodes to classify in one graph, which is the same in all batches, and their classes."""
    fixed = torch.Generator().manual_seed(5)
    x, edges = normal(fixed, NODES, FEATURES), ids(fixed, NODES, 2, 21)
    return (ids(generator, NODES, n), x, edges), ids(generator, CLASSES, n)


class Bags(nn.Module):
    """Means of the tokens' vectors: all tokens in one tensor, and where each example's own begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, WIDTH, mode="mean"), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(tokens, offsets))


def bags(n: int, generator: torch.Generator) -> Batch:
    """One to four tokens for each example, where its own begin, and its class."""
    ends = ids(generator, 4, n).add(1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends[:-1]])
    return (ids(generator, 20, int(ends[-1])), offsets), ids(generator, CLASSES, n)


def bags_of(batch: tuple[Tensor, ...], first: int, last: int) -> tuple[Tensor, ...]:
    """Some examples of a batch of bags: the tokens of each are its own."""
    tokens, offsets, classes = batch
    ends = torch.cat([offsets, offsets.new_tensor([len(tokens)])])
    return tokens[ends[first] : ends[last]], offsets[first:last] - ends[first], classes[first:last]


class Molecules(nn.Module):
    """Messages along dense adjacency, gated, and a sum over the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.message = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        x = self.start(atoms)
        for _ in range(2):
            m = bonds @ self.message(x)
            x = self.gate(m.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.head(x).sum((1, 2))


def molecules(n: int, generator: torch.Generator) -> Batch:
    """Atoms, bonds, and an energy."""
    bonds = ids(generator, 2, n, 4, 4).double()
    return (normal(generator, n, 4, FEATURES), bonds), normal(generator, n)


WHOLE = {"batch": {"x": None, "edge_index": None}}
DIMS = (0, None, None, 0)
MODELS = {
    "gcn": Paper("Kipf, Welling, Graph Convolutional Networks, 2017", Gcn, graph, F.cross_entropy, DIMS, WHOLE),
    "graphsage": Paper(
        "Hamilton, Ying, Leskovec, Inductive Representation, 2017", Sage, graph, F.cross_entropy, DIMS, WHOLE
    ),
    "gat": Paper("Velickovic et al., Graph Attention Networks, 2018", Gat, graph, F.cross_entropy, DIMS, WHOLE),
    "fast_text": Paper(
        "Joulin et al., Bag of Tricks, 2017", Bags, bags, F.cross_entropy, bags_of, {"batch": bags_of}, examples=6
    ),
    "message_passing": Paper("Gilmer et al., Neural Message Passing, 2017", Molecules, molecules, F.mse_loss),
}
