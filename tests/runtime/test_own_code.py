"""The user's own modules in a stage: whose code, which tensors, and which mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitc.runtime.errors import LaunchError
from splitc.runtime.own_code import OwnModel, own_function, own_model, own_module, plain_tensors
from splitc.runtime.weights import build
from tests.support import untraceable

GATED = "tests.support.untraceable:gated"


def test_a_model_is_made_by_its_factory_or_copied_without_data() -> None:
    given = untraceable.gated()
    for origin in (given, GATED):
        model = own_model(origin)
        assert model is not given
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in given.named_parameters()]
    assert all(tensor.is_meta for tensor in own_model(given).parameters())


def test_plain_tensors_become_buffers_that_no_state_dict_has() -> None:
    given = untraceable.gated()
    assert set(plain_tensors(given)) == {"middle.0.scale"}
    model = own_model(given)
    assert "middle.0.scale" in dict(model.named_buffers())
    assert "middle.0.scale" not in model.state_dict()
    assert set(plain_tensors(given)) == {"middle.0.scale"}


def test_a_stage_is_filled_like_any_other() -> None:
    given: Any = untraceable.gated()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = own_module(own_model(given), "middle.0")

    weights = {f"own.{k}": v for k, v in {**given.middle[0].state_dict(), "scale": torch.ones(6)}.items()}
    stage: Any = build(Stage, weights, torch.device("cpu"))
    x = torch.randn(4, 6)
    torch.testing.assert_close(stage.own(x), x + given.middle[0].fc(x))


def test_a_whole_model_has_its_own_names() -> None:
    stage: Any = OwnModel(own_module(own_model(untraceable.Whole()), "", ()))
    assert {name for name, _ in stage.named_parameters()} == {"weight", "inner.weight", "inner.bias"}
    assert not stage.eval().own.training


def test_submodules_stay_in_evaluation_mode_in_training() -> None:
    module: Any = own_module(own_model(untraceable.Frozen()), "", ("norm",))
    assert [each.training for each in (module.train(), module.norm, module.fc)] == [True, False, True]
    assert not module.eval().fc.training


def test_a_module_that_takes_gradients_does_so_in_evaluation_too_and_returns_none() -> None:
    given = untraceable.Force()
    module: Any = own_module(own_model(given).to_empty(device="cpu"), differentiates=True)
    module.load_state_dict(given.state_dict())
    x = torch.randn(4, 6)
    with torch.no_grad():
        made = module(x)
    assert not made.requires_grad and module(x).requires_grad
    torch.testing.assert_close(made, given(x).detach())


def test_code_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(
        LaunchError, match=r"user's own code, no_such.file:make, .* put the folder of no_such into PYTHON"
    ):
        own_model("no_such.file:make")


def test_the_file_of_own_code_may_have_a_name_that_no_variable_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "01-my.py").write_text("class Models:\n    double = staticmethod(lambda x: x * 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert own_function("01-my:Models.double")(torch.ones(1)) == 2


def test_a_function_becomes_a_module() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert own_function(double)(torch.ones(1)) == 2
    assert own_function("tests.support.untraceable:finite_loss").function is untraceable.finite_loss
