"""What each kind of layer does to the states of values (LAYOUTS 3): every plan here trains as one process does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.placements import Placement
from splitc.ir.transitions import shard, slice_features
from splitc.ir.wire import wire
from tests.support.compiled import compiled
from tests.support.models import Made, made
from tests.support.sampling import sampled
from tests.support.wire_bytes import assert_defined

VOCABULARY = 13


def turns(cases: Iterable[Any]) -> list[tuple[Any, ...]]:
    """(world, ...) of each case, in a world of 4, 2 and 3 ranks in turn."""
    return [(world, *(each if isinstance(each, tuple) else (each,))) for world, each in zip(cycle((4, 2, 3)), cases)]


def pin(world: int, split: str | None = None, state: str | None = None) -> Placement:
    """Groups of all ranks, of two of four."""
    return Placement(None, "sharded" if split else None, group=2 if world == 4 else world, split=split, state=state)


def planned(
    model: nn.Module, batch: tuple[Any, ...], world: int, strategy: str, pins: dict[str, Placement]
) -> CompiledProgram:
    """A program with these pins, the rest in groups, which trains as one process does."""
    torch.manual_seed(0)
    program = compiled(model.double(), batch, None, None, world, strategy, pins={"*": pin(world), **pins})
    result = program.verify(steps=2)
    assert result.holds, str(result)
    return program


def trained(model: nn.Module, batch: tuple[Any, ...], world: int, **pins: Placement) -> CompiledProgram:
    """The same of the strategy that is the best with these pins."""
    return planned(model, batch, world, "mixed", pins)


class Judged(Made):
    """A model of two inputs, the second its targets."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.run(self, x, y)


def judged(run: Any, **children: Any) -> nn.Module:
    return Judged(run, **children)


def count(program: CompiledProgram, function: Any) -> int:
    """How many nodes call a function."""
    return sum(node.target is function for node in program.program.graph.nodes)


def vectors(width: int = 8, classes: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    return torch.randn(7, width, dtype=torch.float64), torch.randint(classes, (7,))


# -- cross entropy on divided logits -----------------------------------------------------------------------------------


class CausalLM(nn.Module):
    """A language model whose loss shifts logits and labels against each other, as those of transformers do."""

    def __init__(self, shift: str, tied: bool = False) -> None:
        super().__init__()
        self.shift = shift
        self.wte, self.ln, self.fc = nn.Embedding(VOCABULARY, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.wte(ids)
        logits = self.lm_head(h + torch.relu(self.fc(self.ln(h))))
        if self.shift == "logits":
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return nn.CrossEntropyLoss()(logits.view(-1, VOCABULARY), labels.view(-1))
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        logits = logits.to(h.dtype).view(-1, logits.shape[-1])
        return F.cross_entropy(logits, labels.view(-1).to(logits.device), ignore_index=-100)


@pytest.mark.slow
@sampled(("world", "shift"), [(4, "logits"), (3, "labels"), (2, "labels")], one_in=3)
def test_the_shift_of_language_models_keeps_logits_divided(world: int, shift: str) -> None:
    ids = torch.randint(VOCABULARY, (7, 5))
    program = trained(CausalLM(shift), (ids, ids.clone()), world, lm_head=pin(world, "columns"))
    assert (count(program, shard), count(program, comm_ops.cross_entropy)) == (0, 1)
    assert "comm.cross_entropy(" in "".join(program.files.values())


@pytest.mark.slow
def test_a_pin_of_the_layer_to_replicate_gathers_its_logits_as_splitbrain_does() -> None:
    ids = torch.randint(VOCABULARY, (7, 5))
    program = trained(CausalLM("logits"), (ids, ids.clone()), 2, lm_head=pin(2, "columns", "replicate"))
    assert (count(program, shard), count(program, comm_ops.cross_entropy)) == (1, 0)


LOSSES: dict[str, Any] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored targets": {"ignore_index": 2},
    "padding": {"ignore_index": 0},
    "weights": {"weight": True},
    "label smoothing": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.1, "weight": True, "ignore_index": 2},
}


def classifier(options: dict[str, Any], classes: int = VOCABULARY) -> nn.Module:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = {"weight": net.balance} if options.get("weight") else {}
        return F.cross_entropy(net.fc(torch.relu(net.a(x))), y, **{**options, **weight})

    model = judged(run, a=nn.Linear(8, 7), fc=nn.Linear(7, classes))
    model.register_buffer("balance", torch.rand(classes))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), turns(LOSSES))
def test_every_cross_entropy_is_exact_on_divided_logits(world: int, name: str) -> None:
    program = trained(classifier(LOSSES[name]), vectors(), world, fc=pin(world, "columns"), a=pin(world, "columns"))
    assert count(program, comm_ops.cross_entropy) == 1


@pytest.mark.slow
def test_a_loss_of_each_example_is_exact_on_divided_logits() -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(x), y, reduction="none").square().mean()

    program = trained(judged(run, fc=nn.Linear(8, VOCABULARY)), vectors(), 3, fc=pin(3, "columns"))
    assert count(program, comm_ops.cross_entropy) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "divided"), [(6, 0), (7, 1)])
def test_logits_stay_divided_where_sums_are_fewer_numbers_than_the_logits(classes: int, divided: int) -> None:
    program = trained(classifier({}, classes), vectors(classes=classes), 2, fc=pin(2, "columns"))
    assert count(program, comm_ops.cross_entropy) == divided


@pytest.mark.slow
def test_the_wire_has_the_maximum_and_the_sums_of_a_divided_cross_entropy() -> None:
    program = trained(classifier({"label_smoothing": 0.1}), vectors(), 2, fc=pin(2, "columns")).program
    found = [op.shape[0] for op in wire(program, 0) if op.payload.name == "cross_entropy"]
    assert found == [1, 3] * 2, "in each of two microbatches, and nothing in backward"


# -- what leaves the last dim whole ------------------------------------------------------------------------------------

ON_SLICES: dict[str, Any] = {
    "a slice of steps": lambda h: h[:, 1:],
    "one step": lambda h: h[:, -1],
    "a view": lambda h: h.view(-1, 12).sin().view(h.size(0), 3, 12),
    "a transpose": lambda h: h.transpose(0, 1).contiguous().transpose(1, 0),
    "a permutation": lambda h: h.permute(1, 0, 2).permute(1, 0, 2),
    "a mean over steps": lambda h: h.mean(1),
    "chunks of steps": lambda h: torch.cat([part.tanh() for part in h.split(2, dim=1)], dim=1),
    "a concatenation of steps": lambda h: torch.cat([h, h * 2.0], 1),
    "new dims": lambda h: h.unsqueeze(1).squeeze(1),
    "a cast": lambda h: h.float().double(),
}
ON_WHOLE: dict[str, Any] = {
    "some features": lambda h: h[..., :5],
    "a transpose of features": lambda h: h.transpose(1, 2),
    "a view of other features": lambda h: h.view(-1, 6),
    "a maximum of features": lambda h: h.amax(-1),
    "chunks of features": lambda h: torch.cat(h.chunk(2, dim=-1), dim=1),
    "a concatenation of features": lambda h: torch.cat([h, h], -1),
}


def sequences(function: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    def run(net: Any, x: Tensor) -> Tensor:
        return function(torch.tanh(net.a(x))).square().mean()

    return made(run, a=nn.Linear(8, 12)), (torch.randn(6, 3, 8, dtype=torch.float64),)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), turns(ON_SLICES))
def test_what_leaves_the_last_dim_whole_runs_on_slices_of_features(world: int, name: str) -> None:
    program = trained(*sequences(ON_SLICES[name]), world, a=pin(world, "columns"))
    assert count(program, shard) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_WHOLE)
def test_what_reads_or_moves_features_reads_the_whole(name: str) -> None:
    program = trained(*sequences(ON_WHOLE[name]), 2, a=pin(2, "columns"))
    assert [node.name for node in program.program.graph.nodes if node.target is shard] == ["tanh_whole"]


# -- constants and parameters of elementwise functions -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", (4, 3))
def test_a_parameter_of_each_feature_is_divided_with_them(world: int) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return (torch.tanh(net.a(x)) * net.gain + net.offset).square().mean()

    model = made(run, a=nn.Linear(8, 7))
    model.gain, model.offset = nn.Parameter(torch.rand(7)), nn.Parameter(torch.rand(1, 7))
    program = trained(model, (torch.randn(6, 8, dtype=torch.float64),), world, a=pin(world, "columns"))
    (stage,) = (stage for stage in program.program.stages if stage.role == "head")
    assert dict(stage.shards) == {"a.weight": 0, "a.bias": 0, "gain": 0, "offset": 1}


@pytest.mark.slow
@pytest.mark.parametrize("world", (4, 3))
def test_a_constant_of_each_feature_and_a_parameter_that_others_read_are_sliced(world: int) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return (torch.tanh(net.a(x)) * net.mask + net.gain).square().mean() + (net.gain**2).sum() * x.mean()

    model = made(run, a=nn.Linear(8, 7))
    model.register_buffer("mask", torch.rand(7))
    model.gain = nn.Parameter(torch.rand(7))
    program = trained(model, (torch.randn(6, 8, dtype=torch.float64),), world, a=pin(world, "columns"))
    assert count(program, slice_features) == 2


@pytest.mark.slow
@pytest.mark.parametrize("world", (4, 3))
def test_the_gradient_of_a_number_for_all_features_is_summed_over_the_group(world: int) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return (torch.tanh(net.a(x)) * net.gain + net.offset).square().mean()

    model = made(run, a=nn.Linear(8, 7))
    model.gain, model.offset = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(1))
    trained(model, (torch.randn(6, 8, dtype=torch.float64),), world, a=pin(world, "columns"))


# -- embeddings --------------------------------------------------------------------------------------------------------

TABLES = [("rows", None), ("rows", "batch"), ("rows", "features"), ("columns", None), (None, "batch")]


def language(world: int, *, tied: bool = False, **pins: Placement) -> CompiledProgram:
    ids = torch.randint(VOCABULARY, (7, 5))
    return trained(CausalLM("logits", tied), (ids, ids.clone()), world, **pins)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "split", "state"), turns(TABLES))
def test_an_embedding_is_divided_by_rows_or_columns_to_any_state(
    world: int, split: str | None, state: str | None
) -> None:
    program = language(world, wte=pin(world, split, state))
    assert count(program, comm_ops.embedding) == (split == "rows")
    (stage,) = (stage for stage in program.program.stages if stage.role == "head")
    assert stage.shards.get("wte.weight") == {"rows": 0, "columns": 1, None: None}[split]


@pytest.mark.slow
@sampled(("world", "state"), [(4, None), (3, "batch"), (2, None)], one_in=3)
def test_a_tied_embedding_and_head_are_one_shard(world: int, state: str | None) -> None:
    tied = {"wte": pin(world, "rows", state), "lm_head": pin(world, "columns")}
    program = language(world, tied=True, **tied)
    (stage,) = (stage for stage in program.program.stages if stage.role == "head")
    assert dict(stage.shards) == {"wte.weight": 0}
    assert "comm.embedding(" in "".join(program.files.values())


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, "columns"])
def test_tied_layers_that_are_divided_unlike_each_other_are_refused_by_name(split: str | None) -> None:
    other = "whole" if split is None else "divided along dim 1"
    with pytest.raises(
        PlacementError, match=rf"wte.weight is used {other} by wte \(.*and divided along dim 0 by lm_head"
    ):
        language(2, tied=True, wte=pin(2, split), lm_head=pin(2, "columns"))


@pytest.mark.slow
def test_rows_of_padding_have_no_gradient_and_a_table_may_have_fewer_rows_than_ranks() -> None:
    def run(net: Any, ids: Tensor) -> Tensor:
        return net.fc(net.table(ids) + F.embedding(ids, net.small, -1)).square().mean()

    model = made(run, table=nn.Embedding(3, 8, padding_idx=1))
    model.small = nn.Parameter(torch.randn(3, 8))
    own = {"table": pin(4, "rows"), "small": pin(4, "rows")}
    trained(
        model,
        (torch.randint(3, (6, 2)),),
        4,
        **{k: Placement(**{**vars(p), "group": 4}) for k, p in own.items()},
        **{"*": Placement(group=4)},
    )


# -- parameters in two states ------------------------------------------------------------------------------------------

STATES = [("batch", "replicate"), ("replicate", "batch"), ("batch", "batch")]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "first", "second"), turns(STATES))
def test_each_use_of_a_tied_parameter_is_brought_to_the_same_sum(world: int, first: str, second: str) -> None:
    language(world, tied=True, wte=pin(world, state=first), lm_head=pin(world, state=second))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "first", "second"), turns(STATES))
def test_so_is_that_of_a_parameter_of_which_another_layer_reads_a_part(world: int, first: str, second: str) -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(net.a(x) * net.gain) * net.gain[:5], y)

    model = judged(run, a=nn.Linear(8, 8), fc=nn.Linear(8, 5))
    model.gain = nn.Parameter(torch.rand(8))
    trained(model, vectors(classes=5), world, a=pin(world, state=first), fc=pin(world, state=second))


@pytest.mark.slow
@sampled(("world", "first", "second"), turns(STATES), one_in=3)
def test_a_penalty_counts_once_whatever_the_states_of_its_parameter_and_the_loss(
    world: int, first: str, second: str
) -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(torch.tanh(net.a(x))), y) + 0.1 * (net.a.weight**2).sum()

    model = judged(run, a=nn.Linear(8, 8), fc=nn.Linear(8, 5))
    trained(model, vectors(classes=5), world, a=pin(world, state=first), fc=pin(world, state=second))


@pytest.mark.slow
def test_a_module_in_two_states_that_is_no_function_of_its_parameters_is_refused_by_name() -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(net.norm(torch.tanh(net.norm(x)))) * net.norm.weight[:5], y)

    model = judged(run, norm=nn.LayerNorm(8), fc=nn.Linear(8, 5))
    with pytest.raises(
        PlacementError, match=r"norm.weight is used in state batch by norm \(.*and in another by getitem"
    ):
        trained(model, vectors(classes=5), 2, norm=pin(2, state="batch"))


# -- normalisations ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@sampled(("world", "split", "state"), turns([(None, "batch"), ("columns", None), (None, "replicate")]), one_in=3)
def test_batch_norm_over_examples_runs_in_every_state(world: int, split: str | None, state: str | None) -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(torch.relu(net.norm(net.a(x)))), y)

    model = judged(run, a=nn.Linear(8, 7), norm=nn.BatchNorm1d(7), fc=nn.Linear(7, 5))
    pins = {"a": pin(world, "columns"), "norm": pin(world, split, state), "fc": pin(world, "rows")}
    program = trained(model, vectors(classes=5), world, **pins)
    (stage,) = (stage for stage in program.program.stages if stage.role == "head")
    assert ("norm.running_mean" in stage.shards) == (split is not None)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 2])
def test_a_synchronised_norm_of_own_examples_normalises_over_all_ranks_of_the_role(world: int) -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.fc(torch.relu(net.norm(net.a(x)))), y)

    model = judged(run, a=nn.Linear(8, 7), norm=nn.BatchNorm1d(7), fc=nn.Linear(7, 5))
    pins = {"a": pin(world, "columns"), "norm": pin(world, state="batch"), "fc": pin(world, "rows")}
    strategy = "modulo_shard(mp=2,scheme=BK,sync_batchnorm=True)"
    program = planned(model, vectors(classes=5), world, strategy, pins)
    (norm,) = (node for node in program.program.graph.nodes if node.target is comm_ops.batch_norm)
    assert norm.kwargs == {"own": True}
    assert_defined(program, tuple(each.repeat(*(world, *[1] * (each.dim() - 1))) for each in vectors(classes=5)))
