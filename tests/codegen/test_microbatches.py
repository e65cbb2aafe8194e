"""Loops where microbatches are regular, functions where they are not."""

from __future__ import annotations

from splitc.codegen.layout import Line
from splitc.codegen.microbatches import microbatched
from splitc.ir.actions import Action


def written(cells: str, number: int) -> str:
    """The text of a step of one role: `R0 F0 B0` receives, goes forward and back with microbatch 0; S is the sum."""
    verbs = {"R": "recv", "F": "forward", "B": "backward", "G": "recv_grad", "S": "sum_loss"}
    actions = [Action(verbs[cell[0]], role="a", microbatch=int(cell[1:] or 0)) for cell in cells.split()]

    def lines(action: Action) -> list[Line]:
        return [(f"{action.verb}()" if action.verb == "sum_loss" else f"{action.verb}(x[k])", "")]

    body = microbatched(actions, number, lambda action: action.verb != "sum_loss", lines, lambda role: "comm")
    return "\n".join(text for text, _ in body if text)


def test_what_follows_in_every_microbatch_is_one_loop() -> None:
    assert written("R0 R1 F0 B0 F1 B1 S", 2).splitlines() == [
        "x = {}",
        "for k in comm.microbatches():", "    recv(x[k])",
        "for k in comm.microbatches():", "    forward(x[k])", "    backward(x[k])",
        "sum_loss()",
    ]  # fmt: skip


def test_what_comes_in_turn_is_called() -> None:
    assert written("F0 F1 G0 B0 F2 G1 B1 F3 G2 B2 G3 B3", 4).splitlines()[-7:] == [
        "for k in range(2):", "    forward(k)",
        "for k in range(2):", "    backward(k)", "    forward(k + 2)",
        "for k in range(2, 4):", "    backward(k)",
    ]  # fmt: skip


def test_a_function_leaves_out_a_microbatch_without_examples() -> None:
    text = written("F0 F1 B0 F2 B1 B2", 3)
    assert "def forward(k):\n    if k not in comm.microbatches():\n        return\n    forward(x[k])" in text
