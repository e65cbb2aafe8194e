"""The tasks: models, data, and all that is set for their training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.approximate import data
from benchmarks.approximate.data import Data
from benchmarks.approximate.methods import Method

SAMPLE = 1000  # training examples from which means and deviations for evaluation are taken


class Perceptron(nn.Module):
    """Linear layers with a ReLU between them; each is normalised over the batch, the last one too (IST 3.3).

    bags: the inputs are indices, and the first layer sums their rows of a table.
    """

    def __init__(self, sizes: tuple[int, ...], bags: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        if bags:
            table = nn.EmbeddingBag(sizes[0], sizes[1], mode="sum")
            nn.init.uniform_(table.weight, -(sizes[0] ** -0.5), sizes[0] ** -0.5)  # as a linear layer
            self.layers[0] = table
        self.norms = nn.ModuleList(nn.BatchNorm1d(size, affine=False) for size in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) or (batch, indices) -> (batch, classes)."""
        for k, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(F.relu(x) if k else x))
        return x


@dataclass(frozen=True)
class Task:
    """A model, its data and its training.

    sizes: of the layers, inputs first.  make: its data.  bags: the inputs are indices of features that are 1.
    batch: examples of a step over all ranks.  steps: of a curve.
    ratio: r_P, seconds that the parameters take on a link over seconds that a rank computes for a step.  targets: the
    accuracies to which times are given.  rates: family of methods -> learning rate of SGD.
    repeated: ranks -> how many seeds of repeated methods; one where nothing is said.
    """

    name: str
    sizes: tuple[int, ...]
    make: Callable[[], Data] = field(compare=False)
    batch: int
    steps: int
    ratio: float
    targets: tuple[float, ...]
    rates: Mapping[str, float]
    repeated: Mapping[int, int] = field(default_factory=dict)
    bags: bool = False

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(parameter.numel() for parameter in self.model().parameters())

    def seeds(self, world: int, method: Method) -> int:
        """How many curves of a method there are on `world` ranks."""
        return self.repeated.get(world, 1) if method.repeated else 1

    def model(self, seed: int = 0) -> Perceptron:
        """The model with the weights of a seed."""
        torch.manual_seed(seed)
        return Perceptron(self.sizes, self.bags)

    def recipe(self, method: Method) -> str:
        """All that is set for a curve of a method."""
        return (
            f"{'-'.join(map(str, self.sizes))}, {self.steps} steps of {self.batch}, SGD {self.rates[method.family]:g}, "
            f"r_P {self.ratio:g}, {method.strategy or 'DDP'}"
        )


def held_out(task: Task, examples: Data, state: Mapping[str, Tensor]) -> tuple[float, float]:
    """Accuracy and loss on the held-out examples of a model with the weights of `state`.

    Its normalisations use the means and deviations of `SAMPLE` training examples, taken layer by layer over the whole
    sample; what `state` says of them is not used.
    """
    model = task.model()
    weights = {key: value for key, value in state.items() if key.startswith("layers.")}
    model.load_state_dict(weights, strict=False)
    for norm in model.norms:
        assert isinstance(norm, nn.BatchNorm1d)
        norm.momentum = 1.0
    with torch.no_grad():
        model(examples.inputs[:SAMPLE])
        model.eval()
        batches = zip(examples.held_out_inputs.split(500), examples.held_out_labels.split(500), strict=True)
        found = [(model(inputs), labels) for inputs, labels in batches]
    right = sum(int((output.argmax(1) == labels).sum()) for output, labels in found)
    loss = sum(float(F.cross_entropy(output, labels, reduction="sum")) for output, labels in found)
    return right / len(examples.held_out_labels), loss / len(examples.held_out_labels)


def batch_indices(num_examples: int, batch: int, step: int, seed: int) -> Tensor:
    """The examples of a step's global batch: every epoch is another permutation, and its odd end is left out."""
    epoch, place = divmod(step, num_examples // batch)
    return _order(num_examples, seed + 1_000_003 * epoch)[place * batch : (place + 1) * batch]


@lru_cache(maxsize=1)
def _order(num_examples: int, seed: int) -> Tensor:
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed))


_ALL = (
    Task(
        name="mnist",
        sizes=(784, 1024, 1024, 1024, 10),
        make=data.digits,
        batch=512,
        steps=320,
        ratio=2.5,
        targets=(0.9, 0.94),
        rates={"data_parallel": 1.0, "local_sgd": 1.0, "ist": 1.0},
        repeated={2: 5, 4: 5},
    ),
    Task(
        name="speech",
        sizes=(4096, 1024, 1024, 35),
        make=data.speech,
        batch=512,
        steps=192,
        ratio=2.5,
        targets=(0.8, 0.85),
        rates={"data_parallel": 1.0, "local_sgd": 1.0, "ist": 1.0},
    ),
    Task(
        name="products",
        sizes=(13_590, 512, 2048),
        make=data.products,
        batch=1024,
        steps=128,
        ratio=10.0,
        targets=(0.3, 0.5),
        rates={"data_parallel": 1.0, "local_sgd": 1.0, "ist": 0.3},
        bags=True,
    ),
)
TASKS = {task.name: task for task in _ALL}
