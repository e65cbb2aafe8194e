"""Random plans of random small models: the same seed gives the same model, loss, data, pins and ranks.

A model is a chain of linear layers of random widths, which groups of ranks rarely divide, with what stands between them
in real ones: residual additions, concatenations, products, norms, dropout, views, softmax, shared weights, parameters
of no layer, several outputs.  A plan is made of pins: groups of some size for some of the layers, each divided by
columns or rows or not at all, and its result in some state; roles on ranks of their own, late multiply, one rank.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.ir.transitions import transition_of
from splitc.runtime.collectives.layouts import Transition
from splitc.runtime.errors import LaunchError
from splitc.specialise import Settings, specialise
from tests.support.compiled import CLUSTER, analyse
from tests.support.delays import delays
from tests.support.random_blocks import CLASSES, VOCABULARY
from tests.support.random_losses import LOSSES, Loss
from tests.support.random_runs import random_run
from tests.support.random_training import differences
from tests.support.wire_bytes import assert_defined

WORLDS = (2, 3, 4, 6, 8)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


# -- models ------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks on (b, features) or (b, time, features) that may change the number of features; then scores of classes."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.kind = choose.choice(["features", "features", "sequences", "tokens", "images"])
        self.inputs = choose.randint(3, 7)
        width = choose.randint(3, 9)
        match self.kind:
            case "tokens":
                self.first: nn.Module = (table := nn.Embedding(VOCABULARY, width))
            case "images":
                self.first = Convolutions(choose, width := choose.randint(2, 4))
                width *= 4
            case _:
                self.first = nn.Linear(self.inputs, width, bias=choose.random() < 0.7)
        blocks: list[nn.Module] = []
        for _ in range(choose.randint(1, 5)):
            block, width = random_block(choose, width, self.kind in ("features", "images"))
            blocks.append(block)
        self.by_token = self.kind == "tokens" and choose.random() < 0.6
        self.classes = choose.choice([CLASSES, CLASSES, VOCABULARY, 3 * VOCABULARY])
        if self.by_token and choose.random() < 0.4:  # a language model, whose head is its table of tokens
            self.classes = VOCABULARY
            blocks.append(nn.Linear(width, width := table.embedding_dim))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, self.classes, bias=choose.random() < 0.7)
        if self.by_token and self.head.weight.shape == table.weight.shape and choose.random() < 0.7:
            self.head.weight = table.weight
        self.aux = nn.Linear(width, self.classes) if choose.random() < 0.2 else None

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if x.dim() == 3 and not self.by_token:
            x = x.mean(1)
        scores = self.head(x)
        return scores if self.aux is None else (scores, self.aux(torch.tanh(x)))


class Convolutions(nn.Module):
    """(b, 1, 4, 4) to (b, 4 * width)."""

    def __init__(self, choose: random.Random, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if choose.random() < 0.3 else nn.Identity()
        self.drop = nn.Dropout2d(choose.choice([0.0, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)).flatten(1)


class Step(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, choose: random.Random, width: int, to: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, to, bias=choose.random() < 0.7)
        self.drop = nn.Dropout(choose.choice([0.0, 0.3]))
        self.act = choose.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Identity])()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.linear(x)))


class Sum(nn.Module):
    """x + b(a(x))."""

    def __init__(self, choose: random.Random, width: int) -> None:
        super().__init__()
        middle = choose.randint(3, 9)
        self.a, self.b = Step(choose, width, middle), nn.Linear(middle, width, bias=choose.random() < 0.5)
        self.norm = nn.LayerNorm(width) if choose.random() < 0.4 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(self.norm(x)))


class Meet(nn.Module):
    """Two layers that read one value; their results are added, multiplied or concatenated."""

    def __init__(self, choose: random.Random, width: int, to: int) -> None:
        super().__init__()
        self.how = choose.choice(["add", "multiply", "concatenate", "concatenate the input"])
        self.a, self.b = nn.Linear(width, to), nn.Linear(width, to, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "add":
                return self.a(x) + self.b(x)
            case "multiply":
                return torch.tanh(self.a(x)) * torch.sigmoid(self.b(x))
            case "concatenate":
                return torch.cat([self.a(x).relu(), self.b(x)], -1)
        return torch.cat([x, self.a(x) - self.b(x).tanh()], -1)


class Gain(nn.Module):
    """Parameters of no layer: a factor and a summand for each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Tied(nn.Module):
    """Two layers of one weight, apart or in a row."""

    def __init__(self, choose: random.Random, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.b.weight = self.a.weight
        self.in_a_row = choose.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) if self.in_a_row else self.b(x) + torch.tanh(self.a(x))


class Of(nn.Module):
    """A function without parameters, by name: modules print, lambdas do not."""

    FUNCTIONS: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "softmax": lambda x: x * F.softmax(x, -1),
        "halves": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
        "view": lambda x: x.unflatten(-1, (1, -1)).flatten(-2),
        "over examples": lambda x: x - 0.1 * x.detach().tanh(),
        "normalise": lambda x: F.normalize(x, dim=-1),
        "constant": lambda x: 2.0 * x + 0.5,
        "clamp": lambda x: x.clamp(-1.5, 1.5),
    }

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.FUNCTIONS[self.name](x)

    def extra_repr(self) -> str:
        return self.name


def random_block(choose: random.Random, width: int, flat: bool) -> tuple[nn.Module, int]:
    """A block for values of `width` features, and how many its results have.  flat: they are (b, features)."""
    to = choose.randint(3, 9)
    kind = choose.choices(
        ["step", "sum", "meet", "norm", "gain", "twice", "tied", "function", "dropout"], [8, 4, 4, 2, 1, 1, 1, 3, 1]
    )[0]
    match kind:
        case "step":
            return Step(choose, width, to), to
        case "sum":
            return Sum(choose, width), width
        case "meet":
            block = Meet(choose, width, to)
            return block, {"concatenate": 2 * to, "concatenate the input": width + to}.get(block.how, to)
        case "norm":
            return nn.BatchNorm1d(width) if flat and choose.random() < 0.6 else nn.LayerNorm(width), width
        case "gain":
            return Gain(width), width
        case "twice":
            return Twice(width), width
        case "tied":
            return Tied(choose, width), width
        case "dropout":
            return nn.Dropout(0.4), width
    return Of(choose.choice(sorted(Of.FUNCTIONS))), width


class Shifted(Loss):
    """A language model's loss: the scores of a token are of the next one."""

    def __call__(self, scores: Any, target: Tensor | None = None) -> Tensor:
        assert target is not None
        several = scores if isinstance(scores, tuple) else (scores,)
        return super().__call__(tuple(each[..., :-1, :] for each in several), target[..., 1:])


@dataclass(frozen=True)
class Case:
    """A model with its loss."""

    seed: int
    model: Chain
    loss: Loss
    batch_dim: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def tolerance(self) -> float:
        """Of whole trainings, in which rounding grows."""
        return 1e-8 if self.dtype == torch.float64 else 1e-3

    def batch(self, examples: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The input, and the target."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        if self.model.kind == "tokens":
            x = torch.randint(VOCABULARY, (examples, 3), generator=generator)
        else:
            shapes = {"sequences": (2, self.model.inputs), "images": (1, 4, 4)}
            shape = shapes.get(self.model.kind, (self.model.inputs,))
            x = torch.randn(examples, *shape, dtype=torch.float64, generator=generator).to(self.dtype)
        shape = (examples, 3) if self.model.by_token else (examples,)
        return (x,), torch.randint(self.model.classes, shape, generator=generator)

    def value(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        """The loss of a batch, as eager code computes it."""
        return self.loss(self.model(*inputs), target)

    @property
    def normalises_the_batch(self) -> bool:
        return any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d) for each in self.model.modules())


def random_case(seed: int) -> Case:
    """The model and loss of a seed."""
    choose = random.Random(f"model {seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Chain(choose).to(choose.choice([torch.float64, torch.float64, torch.float64, torch.float32]))
    loss = Loss(choose.choice(LOSSES))
    return Case(seed, model, Shifted(loss.of) if model.by_token and choose.random() < 0.5 else loss)


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What is asked of the compiler; str() is what a user would write."""

    world: int
    strategy: str
    pins: dict[str, Placement] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        def written(pin: Placement) -> str:
            parts = {name: value for name, value in vars(pin).items() if value is not None}
            return f"Placement({', '.join(f'{name}={value!r}' for name, value in parts.items())})"

        pins = ", ".join(f"{name!r}: {written(pin)}" for name, pin in self.pins.items())
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"world={self.world}, strategy={self.strategy!r}{options}, pins={{{pins}}}"


_STRATEGIES = ("data_parallel", "late_multiply", "hybrid_single", "layer_separation", "parameter_server(servers=1)")


def random_plan(seed: int, program: Program, worlds: tuple[int, ...] = WORLDS) -> Asked:
    """A plan for the layers of a program."""
    choose = random.Random(f"plan {seed}")
    world = choose.choice(worlds)
    layers = [layer.name for layer in program.layers]
    kinds: dict[str, Callable[[], tuple[str, dict[str, Placement]]]] = {
        "groups of all ranks": lambda: ("mixed", _in_groups(choose, program, layers, world)),
        "any place": lambda: ("mixed", _anywhere(choose, program, layers, world)),
        "separated": lambda: _separated(choose, program, layers, world),
        "a strategy": lambda: (choose.choice([*_STRATEGIES, f"modulo_shard(mp={choose.choice(_sizes(world))})"]), {}),
    }
    strategy, pins = kinds[choose.choices(list(kinds), [4, 1, 2, 1])[0]]()
    number, schedule = choose.choice([1, 1, 2, 3, 4]), choose.choice(["all_forward", "1f1b"])
    if number > 1:
        pieces = f"microbatches={number}, schedule={schedule}"
        strategy = f"{strategy[:-1]}, {pieces})" if strategy.endswith(")") else f"{strategy}({pieces})"
    options: dict[str, Any] = {}
    if choose.random() < 0.4:
        options["global_batch"] = choose.randint(world, 3 * world + 2) * (1 if number == 1 else number)
    return Asked(world, strategy, pins, options)


def _in_groups(choose: random.Random, program: Program, layers: list[str], world: int) -> dict[str, Placement]:
    """Groups for all layers, or for some in a row; or of two sizes."""
    sizes = _sizes(world)
    first, last = sorted(choose.sample(range(len(layers) + 1), 2))
    how = choose.choice(["all", "all", "tail", "tail", "middle", "two sizes"])
    if how == "two sizes":
        front = dict(_grouped(choose, program, layers[:first], choose.choice(sizes)))
        return front | dict(_grouped(choose, program, layers[first:], choose.choice(sizes)))
    first, last = 0 if how == "all" else first, last if how == "middle" else len(layers)
    pins = dict(_grouped(choose, program, layers[first:last], choose.choice(sizes)))
    for name in layers[:first] + layers[last:]:
        if choose.random() < 0.3 and _is_matrix(program, name) and "first" not in name:
            pins[name] = Placement(sync="late_multiply")
    return pins


def _anywhere(choose: random.Random, program: Program, layers: list[str], world: int) -> dict[str, Placement]:
    """A place for each layer, whatever the others have."""
    sizes, others = _sizes(world), [Placement(role="head"), Placement(sync="late_multiply"), Placement(group=1)]
    return {
        name: _in_group(choose, program, name, choose.choice(sizes)) if choose.random() < 0.6 else choose.choice(others)
        for name in layers
        if choose.random() < 0.8
    }


def _separated(
    choose: random.Random, program: Program, layers: list[str], world: int
) -> tuple[str, dict[str, Placement]]:
    """A trunk and a head on ranks of their own, where the head's layers may be in groups."""
    n_f = choose.randint(1, world - 1)
    cut = choose.randint(1, max(1, len(layers) - 1))
    pins = {name: Placement(role="trunk") for name in layers[:cut]}
    sizes = _sizes(n_f)
    if sizes and choose.random() < 0.7:
        pins |= {
            name: replace(pin, role="head")
            for name, pin in _grouped(choose, program, layers[cut:], choose.choice(sizes))
        }
    else:
        pins |= {name: Placement(role="head") for name in layers[cut:]}
    return f"layer_separation(n_c={world - n_f}, n_f={n_f})", pins


def _sizes(ranks: int) -> list[int]:
    return [size for size in range(2, ranks + 1) if ranks % size == 0]


def _grouped(choose: random.Random, program: Program, layers: list[str], size: int) -> Iterator[tuple[str, Placement]]:
    for name in layers:
        yield name, _in_group(choose, program, name, size)


def _in_group(choose: random.Random, program: Program, name: str, size: int) -> Placement:
    """A layer of two dims of weights divided, by columns or rows, or whole; each in every state that it may have."""
    if _is_matrix(program, name) and choose.random() < 0.7:
        if choose.random() < 0.5:
            return Placement(holding="sharded", group=size, split="columns", state=choose.choice([None, *_STATES]))
        return Placement(holding="sharded", group=size, split="rows", state=choose.choice([None, *_STATES]))
    state, arrives = choose.choice([None, "batch", "replicate"]), choose.choice([None, None, "replicate"])
    return Placement(holding="replicated", group=size, state=state, arrives=arrives)


def _is_matrix(program: Program, name: str) -> bool:
    return any(len(program.tensors[held].shape) == 2 for held in program.layer(name).tensors)


_STATES = ("batch", "features", "replicate")


# -- outcomes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a seed.  refused: why the plan cannot be.  wrong: what differs from one process."""

    seed: int
    asked: Asked | None = None
    refused: str = ""
    wrong: str = ""
    transitions: tuple[Transition, ...] = ()

    @property
    def names_a_layer(self) -> bool:
        """Whether the refusal names a layer, or a line of the model or the loss, or the ranks that get no example."""
        return (
            re.search(
                r"\bfirst|\bblocks\.|\bhead|\baux|\.py:\d+|ranks? [\d, ]*without any|microbatches of role", self._said
            )
            is not None
        )

    @property
    def _said(self) -> str:
        """The refusal; where all strategies refused, that of a mixture by pins."""
        mixed = re.search(r"- mixed: (.*)", self.refused)
        return mixed[1] if mixed else self.refused

    @property
    def reason(self) -> str:
        """Why it was refused, without the names of this model, the first reason of several."""
        refused = self._said.partition("; ")[0]
        return re.sub(r"\b(blocks[._]\w+|first\w*|head\w*|aux\w*)(\.\w+)*\b", "...", re.sub(r"\d+", "N", refused))


def outcome(seed: int, worlds: tuple[int, ...] = WORLDS) -> Outcome:
    """Compile the plan of a seed; compare its training with one process, and its bytes with its definition."""
    case = random_case(seed)
    inputs, target = case.batch(4, 0)
    example = Example.bind(case.model, inputs, target, case.loss)
    program = analyse(case.model, inputs, target, case.loss)
    asked = random_plan(seed, program, worlds)
    if case.normalises_the_batch:  # which needs two examples a rank, in each of its microbatches
        strategy = re.sub("microbatches=[34]", "microbatches=2", asked.strategy)
        asked = replace(asked, strategy=strategy, options={"global_batch": 4 * asked.world})
    settings = Settings(asked.world, strategy=asked.strategy, cluster=CLUSTER, pins=asked.pins, **asked.options)
    try:
        compiled = CompiledProgram(specialise(program, settings), case.model, example, settings)
    except PlacementError as error:
        return Outcome(seed, asked, refused=str(error))
    with delays(seed) if seed % 2 else nullcontext():
        result = compiled.verify(steps=2)
        if not result.holds and case.dtype == torch.float32 and result.gradient_error < case.tolerance:
            result = compiled.verify(steps=2, dtype=torch.float64)  # it may be rounding, where terms cancel
        wrong = "" if result.holds and result.tolerance <= TOLERANCES[case.dtype] else str(result)
        if not wrong and seed % 3 == 1 and not case.normalises_the_batch:
            try:
                wrong = "\n".join(differences(case, compiled, random_run(random.Random(f"run {seed}"), compiled)))
            except LaunchError as error:  # of a batch that is too small for the plan
                return Outcome(seed, asked, refused=str(error))
    if not wrong and seed % 3 == 0:
        inputs, target = case.batch(compiled.plan.global_batch, 1)
        assert_defined(compiled, (*inputs, target))
    if not wrong and seed % 3 == 2:
        plan = Plan.from_json(compiled.plan.to_json())
        again = CompiledProgram(specialise(program, settings, plan), case.model, example, settings)
        wrong = "" if again.files == compiled.files and compiled.report() else "plan.json gives other files"
    return Outcome(seed, asked, wrong=wrong, transitions=tuple(transitions(compiled)))


def transitions(compiled: CompiledProgram) -> Iterator[Transition]:
    """The transitions of a program."""
    for stage in compiled.program.stages:
        for node in stage.graph.nodes:
            if (transition := transition_of(node)) is not None:
                yield transition
