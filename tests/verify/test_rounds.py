"""What `verify` says of plans that train in rounds: right ones equal copies in one process, wrong ones do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram, compile_example
from splitc.ir.plan import Plan
from splitc.specialise import Settings
from splitc.strategies.independent_subnets import IndependentSubnets
from tests.support.compiled import CLUSTER, compiled
from tests.support.sampling import sampled


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(12) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 12), middle, nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))


def local(period: int, world: int = 2, dtype: torch.dtype = torch.float64) -> CompiledProgram:
    batch = torch.randn(8, 6, dtype=dtype), torch.arange(8) % 4
    return compiled(network().to(dtype), batch[:1], batch[1], F.cross_entropy, world, f"local_sgd({period=})")


@pytest.mark.slow
@sampled(("world", "period"), [(2, 2), (1, 2), (2, 1), (3, 2), (2, 5)], one_in=5)
def test_local_sgd_trains_as_copies_do_in_one_process(world: int, period: int) -> None:
    result = local(period, world).verify()
    assert result.holds and result.tolerance == 1e-9, result
    assert result.steps == (3 if period == 1 else 5)
    assert f"against one process that trains {world} copies in turn" in str(result) and "approximate" in str(result)
    assert any("rounds of 2 updates; the plan has rounds of 5" in note for note in result.notes) == (period == 5)


@pytest.mark.slow
def test_rounds_in_float32_begin_with_what_the_ranks_have() -> None:
    result = local(2, dtype=torch.float32).verify(steps=7)
    assert result.holds and result.tolerance == 1e-5 and result.steps == 7, result


@pytest.mark.slow
def test_sizes_of_local_batches_weigh_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.compiled.few_of", lambda program: (3, 7))
    result = local(2).verify()
    assert result.holds and result.examples == 10, result


class Block(nn.Module):
    """Attention, and an MLP whose neurons are dealt, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 11), nn.GELU(), nn.Dropout(0.2), nn.Linear(11, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        scores: Tensor = self.head((x + self.mlp(self.norm(x))).mean(1))
        return scores


def hidden(*widths: int, drop: float = 0.0, norm: bool = True) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] * norm), nn.ReLU(), nn.Dropout(drop)]
    return [*layers, nn.Linear(widths[-1], 4)]


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), *hidden(48, 9, 7, drop=0.3))


def bags() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20, 9, mode="sum"), nn.BatchNorm1d(9), nn.ReLU(), *hidden(9, 7))


SUBNETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "normed": (lambda: nn.Sequential(*hidden(6, 9, 7, drop=0.2)), lambda: torch.randn(8, 6)),
    "insert_norm": (lambda: nn.Sequential(*hidden(6, 9, 7, drop=0.2, norm=False)), lambda: torch.randn(8, 6)),
    "block": (Block, lambda: torch.randn(8, 3, 8)),
    "convolutions": (convolutions, lambda: torch.randn(8, 1, 6, 6)),
    "bags": (bags, lambda: torch.randint(0, 20, (8, 5))),
}


def subnets(name: str, world: int, local_steps: int = 2, insert_norm: bool = True) -> CompiledProgram:
    torch.manual_seed(world)
    model, x = SUBNETS[name][0](), SUBNETS[name][1]()
    strategy = IndependentSubnets(local_steps=local_steps, insert_norm=insert_norm)
    settings = Settings(world, strategy=strategy, cluster=CLUSTER)
    return compile_example(model, Example.bind(model, x, torch.arange(8) % 4, F.cross_entropy), settings)


@pytest.mark.slow
@sampled("name", SUBNETS, one_in=5)
def test_subnets_train_as_masked_ones_do_in_one_process(name: str) -> None:
    for world in (1, 3) if name == "bags" else (3,):
        result = subnets(name, world, local_steps=world).verify(dtype=torch.float64)
        assert result.holds and result.tolerance == 1e-9, result
    assert "against one process that trains 3 masked subnets in turn" in str(result)


@pytest.mark.slow
def test_a_plan_with_inserted_norms_is_followed_again() -> None:
    made = subnets("insert_norm", 2)
    plan, model = Plan.from_json(made.plan.to_json()), SUBNETS["insert_norm"][0]()
    example = Example.bind(model, torch.randn(8, 6), torch.arange(8) % 4, F.cross_entropy)
    again = compile_example(model, example, Settings(2, cluster=CLUSTER), plan=plan)
    assert again.plan == made.plan and again.files == made.files
    assert again.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_subnets_are_judged_in_float32() -> None:
    result = subnets("block", 2).verify()
    assert result.holds and result.tolerance == 1e-5 and result.gradient_error == 0, result


def breaks(made: CompiledProgram, pattern: str, new: str) -> None:
    """Edit the files, and see that it is noticed."""
    edited = {file: re.sub(pattern, new, text, flags=re.MULTILINE) for file, text in made.files.items()}
    assert edited != made.files
    made.__dict__["files"] = edited
    assert not made.verify().holds


BROKEN = {
    "units do not average": (r"comm\.average\(.*\)", "pass"),
    "a statistic is not averaged": (r'^ *"1\.running_var",\n', ""),
    "gradients are halved": (r"loss\.backward\(\)", "(loss / 2).backward()"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_round_that_is_wrong_is_noticed(name: str) -> None:
    breaks(local(2), *BROKEN[name])


BROKEN_SUBNETS = {
    "an optimizer's state is not averaged": (r", optimizer=True", ""),
    "what is whole is not averaged": (r"comm\.average\(.*\)|head\.average\(.*\)", "pass"),
    "a scale is dealt otherwise than its layer": (r'"1\.weight": \{0: \(Neurons\("0"', '"1.weight": {0: (Neurons("x"'),
    "dropout draws other numbers": ("draw=0", "draw=1"),
}


@pytest.mark.slow
@sampled("name", BROKEN_SUBNETS, one_in=4)
def test_a_subnet_that_is_wrong_is_noticed(name: str) -> None:
    breaks(subnets("normed", 2, insert_norm=False), *BROKEN_SUBNETS[name])


STRATEGIES = [
    ("local_sgd(period=2, outer_lr=0.7, outer_momentum=0.9)", 3),
    ("local_sgd(period=4, fragments=2, delay=1, outer_lr=0.7)", 2),
    ("modulo_shard(mp=2, period=2, scheme=B)", 4),
]


@sampled(("strategy", "world"), STRATEGIES, one_in=3)
def test_what_units_make_of_a_round_is_the_plans(strategy: str, world: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    result = compiled(network().double(), (x,), torch.arange(8) % 4, F.cross_entropy, world, strategy).verify()
    assert result.holds and result.tolerance == 1e-9, result
    assert any("turns" in note for note in result.notes) == ("fragments" in strategy)
