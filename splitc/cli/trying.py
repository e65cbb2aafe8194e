"""`splitc try`: plan a model, verify it, and train ten steps on this machine.  Nothing stays but what was measured."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splitc import units
from splitc.cli.compiling import compiled
from splitc.compiled import CompiledProgram
from splitc.ir.program import LoweredProgram
from splitc.report.tables import rank_list, wrap
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.progress import Step
from splitc.verify.batches import few_of

_SLOW = 1.0  # seconds, a step that is tried with few examples
_BESIDE = {"single_device": "one process", "data_parallel": "DistributedDataParallel"}


def attempt(args: argparse.Namespace) -> int:
    """Print what the model's plan is, whether it is exact, and its first steps; returns 1 when one of these fails."""
    made = compiled(args)
    with Step(f"validating {made.program.name}", args.quiet):
        program = made.validated().program
    print(*map(wrap, _planned(program)), sep="\n", flush=True)
    with Step("training 2 steps on simulated ranks and in one process", args.quiet):
        result = made.verify(steps=2)
    if not (result.holds or result.bounded):
        print(result)
        return 1
    first, *_ = str(result).splitlines()
    print(wrap(f"{first}; the worst gradient is {result.gradient_error:.0e} off"), flush=True)
    if program.part is not None:
        print("not trained: a function divides the batches, of which none can be drawn")
    elif code := _train(made, args):
        return code
    measure = "next  splitc calibrate -o cluster.toml    (--help: on several machines)"
    lines = [measure] * (args.cluster is None)
    on = f"--world {program.plan.world} --cluster {args.cluster or 'cluster.toml'}"
    print(*lines, f"then  splitc compile {args.model} {on} -o build", sep="\n")
    return 0


def _train(made: CompiledProgram, args: argparse.Namespace) -> int:
    """Run a build that is removed afterwards; returns the exit code of its launch.py."""
    paths = str(Path(args.model).parent.resolve()), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of the model's own code
    is_slow_here = args.cluster is not None or made.plan.step_seconds > _SLOW
    sizes = few_of(made.program) if is_slow_here else made.plan.local_batches
    few = ["--data", "splitc.verify.batches:few"] * (sizes != made.plan.local_batches)
    print(f"ten steps here, {sum(sizes)} examples each{', few as they take long' * bool(few)}:", flush=True)
    with tempfile.TemporaryDirectory(prefix="splitc-") as temporary:
        command = [str(made.save(Path(temporary) / "build") / "launch.py"), *few, "--steps", "10", "--log-every", "10"]
        return torchrun(command, made.plan.world).returncode


def _planned(program: LoweredProgram) -> Iterator[str]:
    """A sentence with the rates, then a line for each role that has layers, or ranks that no other one has."""
    plan = program.plan.decided
    rates = {each.strategy.partition("(")[0]: each for each in plan.candidates if each.feasible}
    others = {text: rates[name] for name, text in _BESIDE.items() if name in rates and name != plan.strategy}
    beside = ", ".join(f"{text} {each.samples_per_second:,.0f}" for text, each in others.items())
    yield (
        f"{program.name} on {units.numbered(plan.world, 'rank')} of {plan.prediction.cluster}: {plan.strategy}, "
        f"{plan.samples_per_second:,.0f} samples/s predicted{f' ({beside})' * bool(beside)}"
    )
    busy = {rank for place in plan.placements.values() for rank in plan.roles[place.role]}
    for role, ranks in plan.all_roles.items():
        names = [layer.name for layer in program.layers if plan.placements[layer.name].role == role]
        if not names and busy.issuperset(ranks):
            continue
        held = {tensor for layer in program.layers if layer.name in names for tensor in layer.tensors}
        numbers = units.count(sum(program.tensors[each].numel for each in held if program.tensors[each].parameter))
        ends = ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]])
        yield f"{role} on {rank_list(ranks)}: {ends or 'no layers'}; {numbers} parameters"
