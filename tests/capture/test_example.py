"""An example binds a batch to forward's parameters, and says how model and loss are called on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example, inputs_and_target
from splitc.errors import CaptureError
from tests.support.compiled import compiled


class Net(nn.Module):
    """Takes a tensor by position only, a tensor by name and a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, /, y: Tensor, scale: float) -> Tensor:
        return self.fc(x + y) * scale


X, Y, LABELS = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def example() -> Example:
    return Example.bind(Net(), (X, Y, 2.0), LABELS, F.cross_entropy)


def test_inputs_and_targets_have_names_and_tensors_are_those_of_the_program() -> None:
    bound = example()
    assert list(bound.inputs) == ["x", "y", "scale"] and bound.positional == ("x", "y", "scale")
    assert list(bound.tensors) == ["x", "y", "target"] and bound.batch == 4


def test_several_targets_are_numbered_and_no_input_may_have_their_name() -> None:
    bound = Example.bind(Net(), (X, Y, 1.0), (LABELS, LABELS), lambda out, a, b: out.sum())
    assert list(bound.targets) == ["target0", "target1"]

    bound = Example.bind(nn.Linear(3, 2), X, (Y, Y), torch.triplet_margin_loss)  # which has no signature
    assert list(bound.targets) == ["target0", "target1"]

    def one(out: Tensor, target: Any, beta: float = 1.0) -> Tensor:
        return beta * F.cross_entropy(out, target[0]) + F.cross_entropy(out, target[1])

    bound = Example.bind(Net(), (X, Y, 1.0), (LABELS, 1 - LABELS), one)
    assert list(bound.targets) == ["target"] and list(bound.tensors)[-2:] == ["target_0", "target_1"]
    output = bound.output(Net(), {})
    assert torch.equal(bound.loss_of(output, {}), one(output, (LABELS, 1 - LABELS)))

    class Taken(nn.Linear):
        def forward(self, target: Tensor) -> Tensor:
            return super().forward(target)

    with pytest.raises(CaptureError, match="the model's input 'target' has the name that splitc gives the target"):
        Example.bind(Taken(3, 2), X, LABELS, F.cross_entropy)


def test_model_and_loss_are_called_as_the_user_calls_them() -> None:
    model, bound = Net(), example()
    assert torch.equal(bound.output(model, {}), model(X, Y, 2.0))
    values = {"x": X[:2], "y": Y[:2], "target": LABELS[:2]}
    output = bound.output(model, values)
    assert torch.equal(bound.loss_of(output, values), F.cross_entropy(model(X[:2], Y[:2], 2.0), LABELS[:2]))


def test_rows_are_taken_of_every_tensor() -> None:
    values = example().rows([3, 0])
    assert torch.equal(values["x"], X[[3, 0]]) and torch.equal(values["target"], LABELS[[3, 0]])


def test_another_precision_changes_floats_and_a_copy_of_the_loss() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    wide = Example.bind(Net(), (X, Y, 2.0), LABELS, loss).to(torch.float64)
    assert (wide.tensors["x"].dtype, wide.tensors["target"].dtype) == (torch.float64, torch.int64)
    assert isinstance(wide.loss, nn.CrossEntropyLoss) and wide.loss.weight is not None
    assert wide.loss.weight.dtype == torch.float64 and loss.weight is not None and loss.weight.dtype == torch.float32


class Autoencoder(nn.Module):
    """A variational one, which returns all that its loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.width, self.decoder = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, width = self.mean(x), self.width(x)
        return self.decoder(mean + torch.randn_like(mean) * width.exp()), mean, width, x


def evidence(output: tuple[Tensor, ...], weight: float = 1.0) -> Tensor:
    made, mean, width, x = output
    return F.mse_loss(made, x) - weight * (width - mean**2 - width.exp()).sum(1).mean()


OF_OUTPUT = [("layer_separation", [evidence, lambda output: output[0].abs().mean()]), ("data_parallel", evidence)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "loss"), OF_OUTPUT)
def test_a_loss_of_the_output_alone_needs_no_target(strategy: str, loss: Any) -> None:
    program = compiled(Autoencoder(), torch.randn(4, 3), None, loss, 2, strategy)
    assert program.verify(dtype=torch.float64).holds


def test_a_loss_that_takes_more_than_the_output_needs_a_target() -> None:
    losses: list[Any] = [F.cross_entropy, nn.MSELoss(), [evidence, F.mse_loss], lambda made, mean, *more: made]
    for loss in losses:
        with pytest.raises(
            CaptureError, match=r"no target, and it takes more than the output; .* loss=lambda output: ..."
        ):
            Example.bind(Autoencoder(), torch.randn(4, 3), None, loss)


def of_two(output: Tensor, first: Tensor, second: Tensor) -> Tensor:
    raise AssertionError


DIVIDED: dict[str, tuple[nn.Module, Any, list[Any], int, int | None]] = {
    "inputs and a target": (nn.Bilinear(3, 3, 2), F.cross_entropy, [X, Y, LABELS], 2, 0),
    "an optional input": (Net(), F.cross_entropy, [X, Y, 2.0, LABELS], 3, 0),
    "a target that the loss need not have": (nn.Linear(3, 2), lambda out, target=None: out.mean(), [X, Y], 1, 0),
    "no target where it is not there": (nn.Linear(3, 2), lambda out, target=None: out.mean(), [X], 1, None),
    "no target": (nn.Bilinear(3, 3, 2), torch.mean, [X, Y], 2, None),
    "two targets": (nn.Linear(3, 2), of_two, [X, Y, LABELS], 1, 2),
    "a target of two parts": (nn.Linear(3, 2), of_two, [X, (Y, LABELS)], 1, 2),
    "a target of two parts that the loss takes as one": (nn.Linear(3, 2), F.cross_entropy, [X, (Y, LABELS)], 1, 2),
    "inputs by name": (Net(), F.cross_entropy, [{"x": X, "y": Y}, LABELS], 1, 0),
    "inputs by name alone": (Autoencoder(), evidence, [{"x": X}], 1, None),
}


def test_what_forward_and_loss_take_tells_inputs_from_targets() -> None:
    for name in DIVIDED:
        model, loss, batch, count, parts = DIVIDED[name]
        inputs, target = inputs_and_target(model, loss, batch)
        assert len(inputs) == count if isinstance(inputs, list) else inputs is batch[0], name
        assert target is None if parts is None else len(target) == (parts or len(LABELS)), name


def test_a_batch_that_forward_and_loss_do_not_take_is_refused() -> None:
    cases: list[tuple[Any, Any]] = [(evidence, [X, LABELS]), (F.mse_loss, X), (F.mse_loss, [X, Y, Y])]
    for loss, batch in cases:
        with pytest.raises(CaptureError, match="with a loss the first batch must be inputs and a target"):
            inputs_and_target(Autoencoder(), loss, batch)


@pytest.mark.slow
def test_a_hook_of_the_model_gets_what_was_given_by_position() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert compiled(model, X, LABELS, F.cross_entropy, 2, "data_parallel").verify(dtype=torch.float64).holds


def test_a_sparse_buffer_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(CaptureError, match=r"Linear\.adjacency is a sparse tensor, .*adjacency\.to_dense\(\)"):
        Example.bind(model, X, LABELS, F.cross_entropy)
