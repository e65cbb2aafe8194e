"""The page that explains a hang: who waits for whom, and which rank does not do its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from .state import State

LONG, FIRST = 3.0, 3
"""How many times longer ranks may wait in so many first steps, or while one saves, evaluates, or loads a state."""


def page(states: Mapping[int, State], asker: int, about: Callable[[int], str]) -> str:
    """What explains the wait of `asker`; empty while it may go on.

    states: rank -> what it does; ranks that are missing gave no answer.  about: what is known of such a rank.
    """
    met = _met(states, asker)
    silent = [rank for rank in met if rank not in states]
    busy = [rank for rank in met if rank in states and not states[rank].what]
    allowed = max(each.allowed for each in states.values())
    if any(states[rank].doing not in ("", "step") and states[rank].steps >= FIRST for rank in (asker, *busy)):
        allowed *= LONG
    if states[asker].seconds < allowed:
        return ""
    causes = [f"no word from {about(rank)}" for rank in silent]
    causes += [_busy(rank, states[rank]) for rank in busy]
    waiting = [rank for rank in states if states[rank].what]
    if causes:
        causes[-1] += f"; {_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for it"
    else:
        causes = [_circle({rank: states[rank] for rank in waiting})]
    return "\n".join(["training hangs: " + "\n  and ".join(causes), *_blocks(states)])


def aborted(states: Mapping[int, State], rank: int) -> str:
    """What ranks do when a library ends one of them, as gloo does where they have made unlike calls."""
    where = f": {_circle(states)}" if len({*_places(states).values()}) > 1 else f" {_position(states[rank])}"
    return "\n".join([f"stopped: rank {rank} aborts, as told above{where}", *_blocks(states)])


def alone(rank: int, state: State, seconds: float, store: str) -> str:
    """What a rank says that waits, and has had no word from the store of all ranks for some seconds."""
    text = f"stopped: rank {rank} waits, and has had no word from {store}, where all meet, for {seconds:.0f} s"
    return "\n".join([f"{text}: the line there is cut, or that host is gone or stopped", *_blocks({rank: state})])


def _met(states: Mapping[int, State], asker: int) -> list[int]:
    """The ranks that `asker` waits for, directly or through others, and itself."""
    met = [asker]
    for rank in met:
        met += [end for end in (states[rank].ends if rank in states else ()) if end not in met]
    return sorted(met)


def _busy(rank: int, state: State) -> str:
    lines = [*state.own, state.line] if state.doing == "" else [state.line, *state.own]
    place = next(filter(None, lines), "").partition(": ")[0]
    what = {"": "in your code, ", "step": "computing "}.get(state.doing, "")
    return f"rank {rank} has been {what}{_position(state)}, for {state.seconds:.0f} s ({place})"


def _places(states: Mapping[int, State]) -> dict[int, tuple[bool, int, int, str]]:
    return {rank: (each.doing == "step", each.steps, each.evaluated, each.doing) for rank, each in states.items()}


def _circle(states: Mapping[int, State]) -> str:
    """Who is elsewhere, of ranks that all wait: those that are not where most are, or else behind."""
    places = _places(states)
    number = Counter(places.values())
    usual = max(number, key=lambda place: (number[place], place))
    others = [rank for rank in states if places[rank] == usual]
    if len(number) == 1:
        return f"{_ranks(others)} wait for each other {_position(states[others[0]])}, in different operations"
    at = {rank: f"{_position(each)}, after {each.evaluated} evaluations" for rank, each in states.items()}
    odd = [f"rank {k} is {at[k]} ({_line(states[k]).partition(': ')[0]})" for k in states if k not in others]
    return f"{', '.join(odd)}; {_ranks(others)} {'are' if others[1:] else 'is'} {at[others[0]]}"


def _blocks(states: Mapping[int, State]) -> list[str]:
    """What each rank does, once for ranks that do the same."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, state in states.items():
        what = f"waits in {state.what}" if state.what else "waits for no other rank"
        lines = state.own if not state.what and not state.line else [_line(state)]
        alike.setdefault((f"{_position(state)}: {what}", *lines), []).append(rank)
    text = []
    for (first, *lines), ranks in alike.items():
        least = min(states[rank].seconds for rank in ranks)
        text += [f"  {_ranks(ranks)}, {first}, for {least:.0f} s", *(f"    {line}" for line in lines if line)]
    return text


def _line(state: State) -> str:
    return state.line or next(iter(state.own), "")


def _position(state: State) -> str:
    """`in step 41`, `after step 40`, `in worker.save after step 40`."""
    if state.doing == "step":
        return f"in step {state.steps + 1}"
    return f"in worker.{state.doing} after step {state.steps}" if state.doing else f"after step {state.steps}"


def _ranks(ranks: Collection[int] | Sequence[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(numbers) > 1)} " + " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
