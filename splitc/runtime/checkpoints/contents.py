"""What a checkpoint holds of a rank.

model.NAME                the whole model, under its own keys
optimizer.NAME.KEY        the optimizer's tensors of a parameter
averages.NAME             averaged parameters, where there are some
run                       numbers and names that all ranks need
ranks.N                   what only rank N of the same plan needs to go on bit for bit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, optim

from ..features import FEATURES
from ..generators import random_state
from ..moments import Feature
from ..optimizers import state_by_name
from ..parameter_groups import Groups, options_of
from ..rank import Rank
from ..stage_state import StageState
from ..weights import named_tensors
from .piece import Piece, packed

Counts = Mapping[str, int]
"""The batches trained on, and the examples of those that wait for their update."""


@dataclass
class Contents:
    """What the next steps of a rank depend on.

    scheduled: the optimizer that schedulers follow.  groups: of the whole model's optimizer.  settings: that all ranks
    share.  averages: gives the averaged parameters by name.  objects: what else a user wants saved, by name.
    """

    rank: Rank
    state: StageState
    optimizers: Mapping[str, optim.Optimizer]
    scheduled: optim.Optimizer | None
    groups: Groups
    features: Sequence[Feature]
    settings: Mapping[str, Any]
    averages: Callable[[], Mapping[str, Tensor]]
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of this rank's optimizers."""
        return tuple(sorted({type(each).__name__ for each in self.optimizers.values()}))

    def piece(self, name: str, tensor: Tensor, writers: tuple[int, ...] = ()) -> Piece:
        """The part of a tensor that this rank updates, of the parameter or of something in its shape."""
        return Piece(tensor, *self.state.part(name), writers)

    def section(self, name: str) -> str:
        """Where a checkpoint has a tensor of a stage."""
        return "model" if self.state.first_name(name) in self.state.first_names else "other"

    def optimized(self) -> Iterator[tuple[optim.Optimizer, Mapping[str, Any], str, nn.Parameter]]:
        """Optimizer, group, name and parameter of all that this rank updates."""
        names = {parameter: name for name, parameter in self.state.trained}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from ((optimizer, group, names[p], p) for p in group["params"])

    # -- collect -------------------------------------------------------------------------------------------------------

    def pieces(self, counts: Counts, disks: Sequence[int]) -> dict[str, Any]:
        """What this rank writes, in nested dicts by name.  disks: that of each rank.

        Raises ValueError for what could not be read again without running code.
        """
        state, made = self.state, dict[str, Any](model={}, other={}, averages={})
        for name, tensor in state.unheld.items():
            made[self.section(name)][name] = Piece(tensor)
        disks = () if any(each.own_parameters for each in self.features) else disks  # replicas may be unlike
        tensors = named_tensors(state.stage)
        writers = {name: by for name in tensors if self.rank.index in (by := state.writers(name, disks))}
        for name, by in writers.items():
            part = state.own_part(name, tensors[name])
            made[self.section(name)][state.first_name(name)] = self.piece(name, part, by)
        for name, tensor in self.averages().items():
            if name in writers:
                made["averages"][state.first_name(name)] = self.piece(name, tensor, writers[name])
        full = {part: {name: p for name, p in own.items() if p.tensor.numel()} for part, own in made.items()}
        own = {str(self.rank.index): Piece(packed(self._own(counts)))}
        return {**full, "optimizer": dict(self._optimizer_pieces(writers)), "ranks": own}

    def _optimizer_pieces(self, writers: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, dict[str, Piece]]]:
        for optimizer, _, name, parameter in self.optimized():
            if by := writers.get(name):
                own = optimizer.state[parameter].items()
                tensors = {k: t.to_dense() for k, t in own if isinstance(t, Tensor) and t.numel()}
                whole = parameter.shape
                made = {
                    k: self.piece(name, t, by) if t.shape == whole else Piece(t, writers=by) for k, t in tensors.items()
                }
                yield self.state.first_name(name), made

    def shared(self) -> tuple[Any, ...]:
        """What this rank gives to what all need: kinds of optimizers, options of groups, numbers by parameter, objects.

        Beside the options of a group: whether this rank has parameters of it.
        """
        numbers: dict[str, dict[str, Any]] = {}
        for optimizer, _, name, parameter in self.optimized():
            if self.state.is_writer(name):
                kept = numbers[self.state.first_name(name)] = dict(optimizer.state[parameter])
                kept.update({k: v.device.type if isinstance(v, Tensor) else (v,) for k, v in kept.items()})
        every = zip(*(each.param_groups for each in self.optimizers.values()), strict=True)
        groups = [max(((bool(g["params"]), options_of(g)) for g in same), key=lambda each: each[0]) for same in every]
        return self.kinds, groups, numbers, {name: each.state_dict() for name, each in self.objects.items()}

    def run(self, given: list[tuple[Any, ...]], counts: Counts) -> dict[str, Any]:
        """What all ranks need, of what all of them gave."""
        trained = [each for each in given if each[0]] or given[:1]
        every = zip(*(groups for _, groups, _, _ in trained), strict=True)
        return {
            "settings": dict(self.settings),
            "keys": dict(self.state.first_names),
            "kinds": trained[0][0],
            "groups": self.groups,
            "options": [max(same, key=lambda each: each[0])[1] for same in every],
            "numbers": {name: each for _, _, own, _ in given for name, each in own.items()},
            "objects": trained[0][3],
            "schedules": {name: kind for name, each in self.objects.items() if (kind := schedule_of(each))},
            "global_batch": self.rank.spec.batch_offsets[-1],
            **{each.name: each.concerns(self.rank.spec) for each in FEATURES if each.own_plan},
            **counts,
        }

    def _own(self, counts: Counts) -> dict[str, Any]:
        """What this rank alone needs: where replicas may differ, and the random state of the process."""
        tensors, unlike = named_tensors(self.state.stage), any(each.own_parameters for each in self.features)
        buffers = dict(self.state.stage.named_buffers(remove_duplicate=False))
        differ = [name for name in tensors if (unlike or name in buffers) and not self.state.is_writer(name)]
        waiting = counts["steps"] % self.settings["accumulate"] > 0
        by_name = {role: state_by_name(each, self.state.trained) for role, each in self.optimizers.items()}
        return {
            "tensors": {name: tensors[name].detach() for name in differ},
            "gradients": {name: t.grad for name, t in tensors.items() if waiting and t.grad is not None},
            "optimizers": by_name if unlike else {},
            "groups": {role: each["param_groups"] for role, each in by_name.items()},
            **{each.item: each.state_dict() for each in self.features if each.item},
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
            "random": random_state(),
        }


def schedule_of(value: Any) -> str:
    """The class of a learning-rate scheduler, and of those inside it; nothing for another object."""
    inside = ", ".join(map(schedule_of, getattr(value, "_schedulers", ())))
    return f"{type(value).__name__}{f'({inside})' * bool(inside)}" * isinstance(value, optim.lr_scheduler.LRScheduler)
