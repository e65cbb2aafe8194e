"""Microbatches as a script has them: loops, else functions, each of which does what its actions say."""

from __future__ import annotations

from splitc.codegen.layout import Line
from splitc.codegen.microbatches import microbatched
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.loop_nest import loop_nest


def text_of(*actions: Action, number: int = 2) -> str:
    """The step of these actions, all of which repeat; a line is its action, or that of the loss."""
    nest = loop_nest(actions, number, lambda action: action.verb != "sum_loss", lambda action: False)
    apart = "fc" in nest.apart

    def lines(action: Action) -> list[Line]:
        match action.verb:
            case "forward":
                loss = "loss[k]" if apart else "loss"
                return [(f"{loss} = stage(k)", ""), (f"losses.append({loss}.detach())", "")]
            case "backward":
                return [(f"{'loss.pop(k)' if apart else 'loss'}.backward()", "")]
        return [(f"{action.verb}({action.value})", "")]

    done = microbatched(nest, lines, lambda role: role, {"losses": "[]", "loss": "{}"})
    return "\n".join(line for line, _ in done)


def actions(verb: str, *values: str, role: str = "fc") -> list[list[Action]]:
    """For each microbatch, an action of each value."""
    return [[Action(verb, value, "conv", role, k) for value in values] for k in range(2)]


def run(text: str) -> list[str]:
    """What a step does, in order."""
    done: list[str] = []

    class Comm:
        def microbatches(self) -> range:
            return range(2)

    class Loss(str):
        def detach(self) -> Loss:
            return self

        def backward(self) -> None:
            done.append(f"backward {self}")

    def stage(k: int) -> Loss:
        done.append(f"forward {k}")
        return Loss(k)

    scope = {
        "fc": Comm(), "conv": Comm(), "cut0": "cut0", "cut1": "cut1",
        "recv": lambda value: done.append(f"recv {value}"),
        "send": lambda value: done.append(f"send {value}"),
        "stage": stage,
    }  # fmt: skip
    exec(text, scope)
    return done


def test_two_receives_of_a_role_at_two_places_are_two_functions() -> None:
    first, second = actions("recv", "cut0"), actions("recv", "cut1")
    sends = actions("send", "cut0", role="conv")
    order = [*first[0], *sends[0], *second[0], *sends[1], *first[1], *second[1]]
    text = text_of(*order)
    assert "receive_fc(" in text and "receive_fc_2(" in text
    assert run(text) == ["recv cut0", "send cut0", "recv cut1", "send cut0", "recv cut0", "recv cut1"]


def test_a_loss_whose_backward_is_apart_from_its_forward_is_kept_for_it() -> None:
    forward, receive, backward = actions("forward", ""), actions("recv", "cut0", role="conv"), actions("backward", "")
    order = [*forward[0], *receive[0], *forward[1], *backward[0], *receive[1], *backward[1]]
    text = text_of(*order)
    assert "loss[k] = stage(k)" in text and "loss.pop(k).backward()" in text
    assert run(text) == ["forward 0", "recv cut0", "forward 1", "backward 0", "recv cut0", "backward 1"]


def test_a_backward_that_follows_its_forward_is_one_function_or_loop_with_it() -> None:
    forward, backward = actions("forward", ""), actions("backward", "")
    order = [*forward[0], *backward[0], *forward[1], *backward[1]]
    text = text_of(*order)
    assert "for k in fc.microbatches():" in text and "loss[k]" not in text and "def " not in text
    assert run(text) == ["forward 0", "backward 0", "forward 1", "backward 1"]
