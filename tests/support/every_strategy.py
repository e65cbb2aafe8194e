"""Every exact strategy with the options that make a difference, mixtures by pins, and a small model for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.ir.program import Program
from tests.support.compiled import analyse, compiled

Pins = Mapping[str, str | Placement]


@dataclass(frozen=True)
class Asked:
    """A strategy with its options and pins, as a user asks for it."""

    name: str
    strategy: str
    pins: Pins = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


class Small(nn.Module):
    """A convolution and three linear layers whose features 2, 3 and 4 ranks do not divide."""

    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.fc6 = nn.Linear(27, 14)
        self.fc7 = nn.Linear(14, 13)
        self.fc8 = nn.Linear(13, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        x = self.drop(F.relu(self.fc6(x.flatten(1))))
        scores: Tensor = self.fc8(F.relu(self.fc7(x)))
        return scores


def group_size(world: int) -> int:
    """The smallest group that divides the world."""
    return next(size for size in range(2, world + 1) if world % size == 0)


def separations(world: int) -> Iterator[Asked]:
    """Roles with ranks of their own."""
    for n_c in range(1, world):
        text = f"layer_separation(n_c={n_c}, n_f={world - n_c})"
        yield Asked(text, text)
    if world > 2:
        text = f"layer_separation(ranks={world - 2}+1+1)"
        yield Asked(text, text)


def shardings(world: int) -> Iterator[Asked]:
    """Groups of every size, in every scheme; divided from the first linear layer on."""
    for size in (k for k in range(2, world + 1) if world % k == 0):
        every = Placement(holding="sharded", group=size, split="columns")
        for scheme in ("BK", "B", "B/K"):
            text = f"modulo_shard(mp={size},scheme={scheme})"
            yield Asked(text, text, {"fc*": every})
    size = group_size(world)
    text = f"modulo_shard(mp={size})"
    yield Asked(f"{text} by the planner", text)
    columns, rows = (Placement(holding="sharded", group=size, split=split) for split in ("columns", "rows"))
    yield Asked(f"{text} with rows", text, {"fc6": columns, "fc7": rows, "fc8": Placement(holding="replicated")})


def mixtures(world: int) -> Iterator[Asked]:
    """What no one strategy has: layer by layer, by pins."""
    sharded = Placement(holding="sharded", group=group_size(world))
    late = Placement(sync="late_multiply")
    yield Asked("sharded, late, one rank", "mixed", {"fc6": sharded, "fc7": late, "fc8": "fc"})
    yield Asked("late, sharded", "mixed", {"fc6": late, "fc7": sharded, "fc8": sharded})
    yield Asked("sharded, then all ranks", "mixed", {"fc6": sharded, "fc7": sharded})
    yield Asked("one rank, then late", "mixed", {"fc6": Placement(role="fc"), "fc7": late})


def served(world: int) -> Iterator[Asked]:
    """Servers on ranks of their own and beside workers, layer by layer and all at once."""
    own = ["", f"(servers={world - 1})"] if world > 2 else [""]
    for options in (*own, "(overlap=False)", "(beside=True)", "(servers=2,beside=True,overlap=False)"):
        yield Asked(f"parameter_server{options}", f"parameter_server{options}")


def every_strategy(world: int) -> list[Asked]:
    """All of them for a world of 2 ranks or more."""
    plain = [
        "data_parallel",
        "data_parallel(all_reduce=recursive_doubling)",
        "hybrid_single",
        "late_multiply",
        f"modulo_shard(mp={group_size(world)},all_reduce=recursive_doubling)",
    ]
    late = Asked("late_multiply of all", "late_multiply", {"fc*": Placement(sync="late_multiply")})
    return [
        *(Asked(text, text) for text in plain),
        late,
        *served(world),
        *separations(world),
        *shardings(world),
        *mixtures(world),
    ]


def everywhere(*worlds: int, slow: tuple[int, ...] = (), one_in: int = 1) -> list[Any]:
    """(world, asked) of all strategies in all worlds, for `parametrize`, with names to read.

    Slow are some worlds, and of the others all strategies but the first of every `one_in`.
    """
    return [
        pytest.param(
            world, asked, id=f"{world} {asked}", marks=[pytest.mark.slow] if world in slow or k % one_in else []
        )
        for world in (*worlds, *slow)
        for k, asked in enumerate(every_strategy(world))
    ]


def images(examples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch for `Small` and its classes."""
    return torch.randn(examples, 1, 8, 8, dtype=dtype), torch.randint(0, 5, (examples,))


@cache
def analysed(dtype: torch.dtype = torch.float32, norm: bool = False) -> tuple[Small, Program]:
    """The model and what is known of it, once for all plans."""
    torch.manual_seed(3)
    model = Small(norm).to(dtype)
    return model, analyse(model, *images(4, dtype), F.cross_entropy)


def planned(
    world: int, asked: Asked | str, dtype: torch.dtype = torch.float32, norm: bool = False, **options: Any
) -> CompiledProgram:
    """`Small` compiled as asked."""
    model, known = analysed(dtype, norm)
    asked = Asked(asked, asked) if isinstance(asked, str) else asked
    pins = options.pop("pins", asked.pins)
    images_, labels = images(4, dtype)
    return compiled(
        model, (images_,), labels, F.cross_entropy, world, asked.strategy, analysed=known, pins=pins, **options
    )
