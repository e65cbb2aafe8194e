"""Names of roles: what a plan calls them, and what a pin may call them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from splitc.ir.roles import STAGE_OF_ROLE, has_convolutions, role_names
from tests.support.capturing import capture
from tests.support.models import Made


def test_roles_are_named_by_their_number_and_by_whether_the_model_convolves() -> None:
    assert role_names(1, True) == role_names(1, False) == ("all",)
    assert role_names(2, True) == ("conv", "fc")
    assert role_names(2, False) == ("trunk", "head")
    assert role_names(3, True) == role_names(3, False) == ("stage0", "stage1", "stage2")


def test_a_pin_may_use_any_name_of_a_role() -> None:
    for stage, names in enumerate((("conv", "trunk", "stage0"), ("fc", "head", "stage1"), ("fc2", "stage2"))):
        assert {STAGE_OF_ROLE[name] for name in names} == {stage}
    assert "all" not in STAGE_OF_ROLE and "fc1" not in STAGE_OF_ROLE


KERNEL = nn.Parameter(torch.ones(2, 1, 3, 3))


def test_convolutions_are_found_in_modules_and_functions() -> None:
    for model, shape, expected in [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (2, 1, 5, 5), True),
        (nn.Sequential(nn.ConvTranspose1d(1, 2, 3), nn.Flatten()), (2, 1, 5), True),
        (Made(lambda m, x: F.conv2d(x, m.kernel).flatten(1), kernel=KERNEL), (2, 1, 5, 5), True),
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU()), (2, 5), False),
    ]:
        program = capture(model, (torch.randn(shape),), torch.tensor([0, 1]), F.cross_entropy)
        assert has_convolutions(program) == expected, model
