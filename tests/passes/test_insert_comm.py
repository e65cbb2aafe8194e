"""Where send, recv, all_reduce and push nodes are inserted."""

from __future__ import annotations

from inspect import cleandoc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.checks.graph import cuts_are_communicated
from splitc.ir import comm_ops
from splitc.passes.insert_comm import InsertComm
from tests.support.compiled import compiled
from tests.support.printed import placed, printed, program_after, two_layers


def test_values_that_another_role_reads_are_sent_and_received() -> None:
    program = placed(two_layers(), 3, "layer_separation(n_c=2, n_f=1)")
    assert printed(program_after(InsertComm, program)) == cleandoc("""
    def Sequential(input, target):
        input_1 = input                                                       # f32[b, 8]  trunk
        target = input                                                        # f32[b, 5]  trunk
        sent_target = send(target, cut='target', role='head')                 # f32[b, 5]  trunk
        target_head = recv(sent_target, cut='target', role='trunk', shape=(-1, 5), dtype=float32)  # f32[b, 5]  head
        fc1 = self.fc1(input_1)                                               # f32[b, 6]  trunk
        middle = relu(fc1)                                                    # f32[b, 6]  trunk
        sent_cut0 = send(middle, cut='cut0', role='head')                     # f32[b, 6]  trunk
        cut0 = recv(sent_cut0, cut='cut0', role='trunk', shape=(-1, 6), dtype=float32)  # f32[b, 6]  head
        fc2 = self.fc2(cut0)                                                  # f32[b, 5]  head
        mse_loss = mse_loss(fc2, target_head, reduction='mean')               # f32[]  head
        all_reduce = all_reduce(role='trunk', parameters=('fc1.weight', 'fc1.bias'))  # trunk
        return mse_loss
    """)


def test_a_parameter_of_two_roles_is_no_part_of_what_either_sums() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    pins = {"0": "trunk", "1": "trunk", "2": "head", "3": "head"}
    model = nn.Sequential(first, nn.Linear(8, 8), second, nn.Linear(8, 5))
    program = program_after(InsertComm, placed(model, 4, "layer_separation(n_c=2, n_f=2)", pins=pins))
    summed = [node.kwargs["parameters"] for node in program.graph.nodes if node.target is comm_ops.all_reduce]
    assert summed == [("1.weight", "1.bias"), ("3.weight", "3.bias")]


def test_a_counter_is_stored_in_every_role_that_reads_it() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.count.add_(1)

    model = nn.Sequential(nn.Linear(8, 6), steps := Steps(), nn.Linear(6, 6), steps, nn.Linear(6, 5))
    program = placed(model, 2, "layer_separation", pins={"0": "trunk", "2": "head", "4": "head"})
    lines = [line.split("#")[0].strip() for line in printed(program_after(InsertComm, program)).splitlines()]
    stores = [line for line in lines if "store_buffer(" in line]
    assert stores == [
        "store_buffer = store_buffer(value_1_count_head, steps_3_head)",
        "store_buffer_trunk = store_buffer(value_1_count, steps_3)",
    ]


def test_the_check_finds_a_recv_of_another_cut() -> None:
    program = program_after(InsertComm, placed(two_layers(), 3, "layer_separation(n_c=2, n_f=1)"))
    received = next(node for node in program.graph.nodes if node.target is comm_ops.recv and node.name == "cut0")
    received.update_kwarg("cut", "cut1")
    assert cuts_are_communicated(program) == ["cut0 receives cut cut1 but sent_cut0 sends cut0"]


def test_the_check_finds_a_value_that_is_read_without_send_and_recv() -> None:
    program = program_after(InsertComm, placed(two_layers(), 3, "layer_separation(n_c=2, n_f=1)"))
    nodes = {node.name: node for node in program.graph.nodes}
    nodes["fc2"].replace_input_with(nodes["cut0"], nodes["middle"])
    (problem,) = cuts_are_communicated(program)
    assert problem.startswith("middle of role trunk is read by fc2 of role head")


class _Positions(nn.Module):
    """Adds positions, made before any value of a layer exists, after the second linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(5, device=x.device)
        rows = torch.ones(x.size(0), 5)
        return self.fc2(self.fc1(x).relu()) + positions.sin() * rows


def _squares(scores: Tensor, target: Tensor) -> Tensor:
    return scores.pow(2).mean()


def test_what_reads_a_device_or_a_size_comes_after_the_tensor_that_has_it() -> None:
    program = program_after(InsertComm, placed(_Positions(), 2, "layer_separation", loss=_squares))
    names = [node.name for node in program.graph.nodes]
    for value, reader in program.edges():
        assert names.index(value.name) < names.index(reader.name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "modulo_shard"])
def test_positions_made_early_on_the_device_of_the_input_train_as_in_one_process(strategy: str) -> None:
    batch = torch.randn(4, 8), torch.randn(4, 5)
    assert compiled(_Positions(), *batch, _squares, 2, strategy).verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_a_role_that_receives_nothing_reads_a_device_off_its_inputs() -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target.to(scores.device))

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    program = compiled(model, torch.randn(4, 8), torch.randint(4, (4,)), loss, 2, "layer_separation")
    assert program.verify(dtype=torch.float64).holds
