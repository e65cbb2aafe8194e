"""What `verify` says: that right training is right, whatever the model reads, and that wrong training is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from splitc.compiled import CompiledProgram
from splitc.runtime.seeded.comm import Masks, SeededComm
from splitc.verify.verify import Verification
from tests.support.compiled import compiled
from tests.support.models import Made
from tests.support.sampling import along, sampled
from tests.support.untraceable import FEATURES, Single

F64 = torch.float64
SEPARATION = "layer_separation(n_c=2, n_f=1)"


def program(
    run: Callable[..., Tensor], x: Tensor, world: int = 2, strategy: str = "data_parallel", **children: Any
) -> CompiledProgram:
    torch.manual_seed(0)
    return trains(Made(run, **children), x, F.cross_entropy, world, strategy)


def trains(model: nn.Module, x: Tensor, loss: Any, world: int = 2, strategy: str = "data_parallel") -> CompiledProgram:
    return compiled(model, (x,), torch.arange(len(x)) % 4, loss, world, strategy)


def holds(result: Verification, tolerance: float = 1e-9) -> bool:
    assert result.tolerance == tolerance, result
    return result.holds


# -- dropout and random numbers are on ---------------------------------------------------------------------------------


def attention(m: Any, x: Tensor) -> Tensor:
    """Dropout inside the attention, on merged dims, and of whole channels."""
    x = F.dropout(m.a(x), 0.3)
    x = x + m.att(x, x, x, need_weights=False)[0]
    x = F.dropout(x.reshape(-1, 16), 0.2).view(x.shape)
    return m.fc(F.dropout1d(x.transpose(1, 2), 0.2).mean(2))


def drop_path(m: Any, x: Tensor) -> Tensor:
    """timm's DropPath and torchvision's stochastic depth, noise, and a draw that all examples share."""
    x = m.a(x)
    x = x + torch.relu(m.b(x)) * x.new_empty(x.shape[0], 1).bernoulli_(0.8).div_(0.8)
    x = x + torch.tanh(m.c(x)) * (0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype)).floor()
    x = x + 0.1 * torch.randn_like(x) + torch.randn(1, 16, dtype=x.dtype)
    x = x + torch.normal(torch.zeros_like(x), 0.1) + torch.randint(0, 3, (x.size(0), 16))
    return m.fc(F.rrelu(F.gumbel_softmax(x, -1) * 4, training=True))


def channels(m: Any, x: Tensor) -> Tensor:
    """Dropouts of whole channels, between layers that are divided by features."""
    return m.fc(F.feature_alpha_dropout(F.dropout2d(m.a(x.unsqueeze(2)), 0.4), 0.2, True).mean((1, 2)))


def recomputed(m: Any, x: Tensor) -> Tensor:
    for reentrant in (False, True):
        x = checkpoint(lambda x: F.dropout(m.a(x), 0.4), x, use_reentrant=reentrant)
    return m.fc(x)


def wide(*names: str, width: int = 16) -> dict[str, Any]:
    return {name: nn.Linear(width, width).double() for name in names} | {"fc": nn.Linear(width, 4).double()}


def time_first(m: Any, x: Tensor) -> Tensor:
    """Dropout where the rows of an example lie apart, which no cut may divide."""
    rows = F.dropout(m.a(x).transpose(0, 1).reshape(-1, 16), 0.4)
    return m.fc(m.b(rows).relu().view(x.size(1), -1, 16).mean(0))


def recurrent(m: Any, x: Tensor) -> Tensor:
    """Dropout inside recurrent modules, examples first and time first, with states that are given and that are read."""
    h, (state, _) = m.lstm(m.a(x))
    given = h[:, :1].transpose(0, 1).repeat(2, 1, 1)
    return m.fc(m.gru(h.transpose(0, 1), given)[0].mean(0)) + state.sum((0, 2)).unsqueeze(1)


RANDOM: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, Any]]] = {
    "attention": (
        attention,
        (6, 16),
        {**wide("a"), "att": nn.MultiheadAttention(16, 2, 0.3, batch_first=True).double()},
    ),
    "drop_path": (drop_path, (16,), wide("a", "b", "c")),
    "channels": (channels, (6, 16), wide("a")),
    "time_first": (time_first, (5, 16), wide("a", "b")),
    "recomputed": (recomputed, (16,), wide("a")),
    "recurrent": (
        recurrent,
        (2, 16),
        {
            **wide("a"),
            "lstm": nn.LSTM(16, 12, 2, dropout=0.4, batch_first=True, bidirectional=True, proj_size=8).double(),
            "gru": nn.GRU(16, 16, 2, bias=False, dropout=0.3).double(),
        },
    ),
}


@pytest.mark.slow
@along(1, name=RANDOM, strategy=["data_parallel", SEPARATION, "modulo_shard(mp=2)", "hybrid_single"])
def test_random_models_train_as_in_one_process(name: str, strategy: str) -> None:
    run, shape, children = RANDOM[name]
    world = 3 if strategy == SEPARATION else 2
    made = program(run, torch.randn(8, *shape, dtype=F64), world, strategy, **children)
    text = "".join(made.files.values())
    assert re.search(r"comm\.(dropout|uniform|normal)\(", text)
    result = made.verify()
    assert holds(result) and not any("dropout" in note for note in result.notes), result


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths, which it sorts."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn, self.fc = kind(4, 3, num_layers=2, dropout=0.4, batch_first=True, **options), nn.LazyLinear(4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))
        return self.fc(out.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_dropout_inside_packed_sequences_is_that_of_one_process(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = Packed(kind, bidirectional=kind is nn.GRU).double()
    inputs = torch.randn(4, 6, 4, dtype=F64), torch.tensor([2, 6, 6, 4])
    model(*inputs)
    result = compiled(model, inputs, torch.arange(4), F.cross_entropy, 3, "data_parallel").verify(steps=5)
    assert holds(result), result


@pytest.mark.slow
@sampled("scheme", ["B", "B/K", "BK"], one_in=3)
def test_masks_are_those_of_one_process_in_every_microbatch_scheme_and_on_every_shard(scheme: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.dropout(m.b(F.dropout(m.a(x), 0.3)).relu(), 0.4)
        return m.fc(F.dropout2d(x.unflatten(1, (2, 2, -1)), 0.3).flatten(1))

    made = program(run, torch.randn(8, 16, dtype=F64), 4, f"modulo_shard(mp=4, scheme={scheme})", **wide("a", "b"))
    assert holds(made.verify())


@pytest.mark.slow
def test_masks_that_depend_on_the_rank_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(lambda m, x: m.fc(F.dropout(m.a(x), 0.5)), torch.randn(8, 16, dtype=F64), **wide("a"))
    assert made.verify(steps=1).holds
    masks = SeededComm.masks

    def unlike(part: SeededComm) -> Masks:
        return masks(part)._replace(numbers=torch.tensor((part.role.transport.rank, 0, 0)))

    monkeypatch.setattr(SeededComm, "masks", unlike)
    result = made.verify(steps=1)
    assert not result.holds and result.loss_error > 1e-3


def test_a_mask_of_another_step_or_layer_is_noticed() -> None:
    made = program(lambda m, x: m.fc(F.dropout(m.a(x), 0.5)), torch.randn(8, 16, dtype=F64), **wide("a"))
    made.__dict__["files"] = {name: text.replace("draw=0", "draw=1") for name, text in made.files.items()}
    assert not made.verify(steps=1).holds


# -- models and losses that verify once judged wrongly -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, F64])
def test_a_loss_that_closes_over_the_model_is_that_of_the_model_that_trains(dtype: torch.dtype | None) -> None:
    model = nn.Linear(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = trains(model, torch.randn(8, 8), lambda out, y: F.cross_entropy(out, y) + model.weight.pow(2).sum())
    assert made.verify(dtype=dtype).holds
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.weight.grad is None and model.weight.dtype == torch.float32


def with_ids(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.embedding(x[:, 0].long()) * x[:, 1:])


def with_normalised_weights(m: Any, x: Tensor) -> Tensor:
    weight = F.batch_norm(m.conv.weight.reshape(1, 8, -1), None, None, training=True).reshape_as(m.conv.weight)
    return m.fc(F.conv2d(x, weight).relu().mean((2, 3)))


def in_float32(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.softmax(m.a(x).float(), -1).to(x.dtype) + torch.zeros(8, dtype=torch.float32))


def id_rows() -> Tensor:
    return torch.cat([torch.randint(0, 10, (8, 1)).float(), torch.randn(8, 4)], 1)


JUDGED: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor], dict[str, Any], float]] = {
    "with_ids": (with_ids, id_rows, {"embedding": nn.Embedding(10, 4), "fc": nn.Linear(4, 4)}, 1e-9),
    "with_normalised_weights": (
        with_normalised_weights,
        lambda: torch.randn(8, 3, 6, 6),
        {"conv": nn.Conv2d(3, 8, 3, bias=False), "fc": nn.Linear(8, 4)},
        1e-9,
    ),
    "in_float32": (in_float32, lambda: torch.randn(8, 8), {"a": nn.Linear(8, 8), "fc": nn.Linear(8, 4)}, 1e-5),
}


@sampled("name", JUDGED, ["with_ids"])
def test_a_model_that_trains_right_is_judged_right(name: str) -> None:
    run, x, children, in_double = JUDGED[name]
    made = program(run, x(), **children)
    assert holds(made.verify(), 1e-5)
    assert holds(made.verify(dtype=F64), in_double)


@pytest.mark.slow
def test_the_precision_inside_a_region_decides_too() -> None:
    made = program(lambda m, x: m.fc(m.own(x)), torch.randn(8, FEATURES), own=Single(), fc=nn.Linear(FEATURES, 4))
    assert holds(made.verify(dtype=F64), 1e-5)


def test_a_model_that_has_no_double_precision_is_judged_without_and_that_is_said() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x @ m.hidden["table"].get("eye"))

    class Lookup(dict[str, Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    made = program(run, torch.randn(8, 8), hidden=Lookup(table=Lookup(eye=torch.eye(8))), fc=nn.Linear(8, 4))
    result = made.verify()
    assert result.holds and any("does not run in float64" in note for note in result.notes), result


@pytest.mark.slow
def test_a_complex_model_is_compared_in_both_of_its_parts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.fft.irfft(torch.fft.rfft(m.a(x)) * m.phase, n=8))

    phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    made = program(run, torch.randn(8, 8), a=nn.Linear(8, 8), phase=phase, fc=nn.Linear(8, 4))
    assert holds(made.verify(), 1e-5) and holds(made.verify(dtype=F64))


@pytest.mark.slow
def test_rounding_that_is_magnified_is_told_from_an_error_and_said() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc((m.a(x) * 1e3).sin())

    made = program(run, torch.randn(8, 8), a=nn.Linear(8, 8), fc=nn.Linear(8, 4))
    result = made.verify()
    assert result.holds and any("rounding alone changes gradients" in note for note in result.notes), result
    made.__dict__["files"] = {n: re.sub(*BROKEN["a mean is counted twice"], text) for n, text in made.files.items()}
    assert not made.verify().holds


# -- training that is wrong --------------------------------------------------------------------------------------------


def test_a_coupling_that_a_constant_example_hides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = program(lambda m, x: m.a(x), torch.zeros(8, 8), a=nn.Linear(8, 4)).program.loss_terms
    monkeypatch.setattr(
        "splitc.passes.analysis.validate_capture", lambda program, *_: replace(program, loss_terms=terms)
    )
    made = program(lambda m, x: m.a(x - x.mean(0)), torch.zeros(8, 8), a=nn.Linear(8, 4))
    assert not made.verify().holds


BROKEN = {
    "a mean is counted twice": (r"(\w+_weight)\.wait\(\)", r"(\1.wait() / 2)"),
    "gradients are not summed": (r"with comm\.all_reduce\(.*\):", "if True:"),
    "a gradient is lost": (r"loss\.backward\(\)", "loss.backward(); stage.a.weight.grad = None"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_noticed(name: str) -> None:
    made = program(lambda m, x: m.fc(m.a(x)), torch.randn(8, 16, dtype=F64), **wide("a"))
    pattern, new = BROKEN[name]
    edited = {file: re.sub(pattern, new, text) for file, text in made.files.items()}
    assert edited != made.files
    made.__dict__["files"] = edited
    assert not made.verify().holds
