"""Compile the program that the options ask for; checks run in the order of their cost.

options     strategy, pins, world against cluster, plan.json: all problems at once, in milliseconds
files       import the model file; create model and example
tracing     run the model on fake tensors; when that fails, eagerly, to tell an error of the model from a bug of splitc
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from splitc.capture.validate.behind import Behind
from splitc.cli.model_file import ModelFile, load_model, runs_alone
from splitc.cli.names import Attempts
from splitc.cli.plan_file import read_plan_file
from splitc.codegen.build_folder import WEIGHTS
from splitc.compiled import CompiledProgram, with_formats
from splitc.cost_models.calibration.rank_timer import Progress
from splitc.cost_models.clusters.files import THIS_MACHINE
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.clusters.this_machine import measured_before
from splitc.errors import LaunchError, PlacementError, SplitcError, bullets
from splitc.ir.autocast import autocast_for, require_autocast
from splitc.ir.cluster import Cluster
from splitc.ir.names import near_name
from splitc.ir.pass_manager import Pass
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.printer import print_program
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.short_wire import free_kinds, parse_wire
from splitc.ladder import require_fewer
from splitc.passes.analysis import analyse
from splitc.passes.place import Place
from splitc.passes.planner.pins import contradicted, unknown_words
from splitc.passes.planner.strategy import in_microbatches, parse_strategy
from splitc.report.what_if import advice
from splitc.runtime.progress import Step
from splitc.runtime.transport.formats import AS_COMPUTED
from splitc.specialise import Settings, inserts_norm, specialise, with_norms

_PIN = "--pin 'classifier.*=fc' or --pin 'classifier.1=holding:sharded,group:2'"


def compiled(args: argparse.Namespace) -> CompiledProgram:
    """The program that the options ask for."""
    given = vars(args).get("plan")
    plan, behind = None if given is None else _plan(args, Path(given)), Behind()
    return _planned(args, plan, behind, *analysed(args, plan, behind=behind))


def compiled_on(args: argparse.Namespace, names: Sequence[str]) -> Iterator[CompiledProgram | PlacementError]:
    """The program on each of several clusters, of a model that is traced once; where it has no plan, the reason."""
    plan, behind = None if args.plan is None else _plan(args, Path(args.plan)), Behind()
    each = [argparse.Namespace(**{**vars(args), "cluster": name}) for name in names]
    asked = [_settings(one, plan) for one in each]
    file, _, program = analysed(each[0], plan, behind=behind)
    for one, settings in zip(each, asked, strict=True):
        try:
            yield _planned(args, plan, behind, file, _on_cluster(settings, one), program)
        except PlacementError as error:
            yield error


def _planned(
    args: argparse.Namespace, plan: Plan | None, behind: Behind, file: ModelFile, settings: Settings, program: Program
) -> CompiledProgram:
    """The program of a plan that is chosen, or given, for an analysed model."""
    traced, chosen = [program], partial(with_formats, settings, file.model, file.example)

    def anew() -> LoweredProgram:
        with Step(f"tracing {file.name}", args.quiet) as step:
            doing = step.doing(file.name)
            traced[:] = [_analysed(file, args.verbose, settings, doing, True)]
            return chosen(lambda asked: specialise(traced[0], asked, plan, now=doing))

    with Step(f"planning {file.name} on {settings.world} rank{'s' * (settings.world > 1)}", args.quiet) as step:
        then = watch if args.verbose else None, step.doing(file.name)
        placed = chosen(lambda asked: specialise(program, asked, plan, *then))
        if plan is None and args.command not in ("try", "verify", "tune"):
            step.now(f"planning {file.name} with faster links and larger batches")
            with suppress(TimeoutError):
                place = replace(settings, wire=placed.plan.wire).place()
                prediction = replace(placed.plan.prediction, advice=advice(place, program, placed.plan))
                placed = replace(placed, plan=replace(placed.plan, prediction=prediction))
    asked = replace(settings, code=file.code)
    return CompiledProgram(placed, file.model, file.example, asked, behind, anew, lambda: traced[0], plan)


def analysed(
    args: argparse.Namespace, plan: Plan | None = None, evaluation: bool = True, behind: Behind | None = None
) -> tuple[ModelFile, Settings, Program]:
    """The model that the options name, the settings that they ask for, and the program before a plan is chosen.

    evaluation, behind: see `analyse`.
    """
    settings = _settings(args, plan)
    if (min_world := vars(args).get("min_world")) is not None:
        require_fewer(min_world, settings.world)
    with Step(f"loading {args.model}", args.quiet):
        file = load_model(args.model, args.input)
    with Step(f"tracing {file.name}", args.quiet) as step:
        of = args.verbose, settings, step.doing(file.name), evaluation
        inserts = inserts_norm(settings, plan)
        program = _analysed(file, *of, None if inserts else behind)
        if inserts:
            file = replace(file, model=with_norms(file.model, program, settings.world))
            program = _analysed(file, *of, behind)
    return file, _on_cluster(settings, args), program


def _analysed(
    file: ModelFile, verbose: bool, settings: Settings, now: Progress, evaluation: bool, behind: Behind | None = None
) -> Program:
    # torch logs a traceback for every op that fails on fake tensors; the error says the same
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        traced = partial(analyse, file.model, file.example, name=file.name, watch=watch if verbose else None)
        return traced(autocast=settings.autocast, code=file.code, now=now, evaluation=evaluation, behind=behind)
    except Exception as error:
        is_ours = isinstance(error, SplitcError)
        may_be_the_models = not is_ours or error.__cause__ is not None
        if may_be_the_models and (problem := runs_alone(file, settings.autocast)) is not None:
            raise problem from error
        if not is_ours:
            error.add_note(f"{file.name} itself runs on its example, but splitc could not trace it")
        raise


def _settings(args: argparse.Namespace, plan: Plan | None = None) -> Settings:
    """The options other than the model.  Raises with all problems at once, before anything is imported."""
    if plan is not None:
        cluster = _cluster(args.cluster)
        autocast = autocast_for(parse_autocast(args.autocast), plan)
        return Settings(plan.world, cluster=cluster, memory=args.memory, autocast=autocast)
    attempts = Attempts()
    if args.world is None:
        attempts.problems.append(PlacementError("say how many ranks: --world 4 (or give a plan: --plan plan.json)"))
    strategy = attempts.result(lambda: in_microbatches(parse_strategy(args.strategy), args.microbatches))
    pins = attempts.result(parse_pins, args.pin)
    autocast, wire = attempts.result(parse_autocast, args.autocast), attempts.result(parse_wire, args.wire)
    free = attempts.result(free_kinds, args.wire_error, args.wire)
    cluster = attempts.result(_cluster, args.cluster)
    if strategy is not None and cluster is not None and args.world is not None:
        place = Place(cluster, args.world, strategy, global_batch=args.global_batch, memory=args.memory)
        attempts.problems += map(PlacementError, place.problems())
    attempts.end()
    asked = partial(Settings, args.world, args.global_batch, cluster, strategy or "auto", pins or {}, args.memory)
    asked = partial(asked, autocast=autocast, accumulate=args.accumulate)
    return asked(wire=wire or AS_COMPUTED, wire_error=args.wire_error or 0.0, free=free or (), fewer_readers=True)


def _cluster(name: str | None) -> Cluster | None:
    """The cluster by name; None: this machine, which may not have been measured."""
    return None if name in (None, THIS_MACHINE) else load_cluster(name)


def _on_cluster(settings: Settings, args: argparse.Namespace) -> Settings:
    """The settings with the cluster that they are for, this machine where the options name none.

    It is measured last of all, since that takes seconds and what else is wrong is told in less.
    """
    if settings.cluster is not None or (vars(args).get("plan") is not None and args.cluster is None):
        return settings
    with Step("measuring this machine, once", args.quiet or measured_before() is not None):
        return replace(settings, cluster=load_cluster(None))


def parse_pins(pairs: list[str]) -> dict[str, str | Placement]:
    """`["classifier.*=fc", "head=holding:sharded,group:2"]` -> role or Placement by pattern.

    A pattern given twice has the parts of both.  Raises PlacementError listing all that are malformed.
    """
    pins: dict[str, str | Placement] = {}
    problems: list[str] = []
    for pair in pairs:
        pattern, _, text = (part.strip() for part in pair.rpartition("="))
        if not pattern or not text:
            problems.append(f"--pin {pair}: write PATTERN=PLACEMENT, for example {_PIN}")
            continue
        parts, wrong = _parts(text)
        wrong = wrong or unknown_words(Placement(**parts))
        problems += [f"--pin {pair}: {problem}" for problem in wrong]
        if wrong:
            continue
        before = pins.pop(pattern, Placement())
        before = Placement(role=before) if isinstance(before, str) else before
        problems += [f"--pin {pair}: {pattern} has {old} already" for old in contradicted(before, parts)]
        placement = replace(before, **parts)
        only_role = placement == Placement(role=placement.role) and placement.role is not None
        pins[pattern] = str(placement.role) if only_role else placement
    if problems:
        raise PlacementError(problems[0] if len(problems) == 1 else bullets("these pins cannot be read:", problems))
    return pins


def _parts(text: str) -> tuple[dict[str, Any], list[str]]:
    """The parts of a placement by name, and their problems; a single word is a role."""
    if ":" not in text and "," not in text:
        return {"role": text}, []
    known = [part.name for part in fields(Placement)]
    parts: dict[str, Any] = {}
    wrong: list[str] = []
    for item in text.split(","):
        name, colon, value = (word.strip() for word in item.partition(":"))
        if not colon:
            wrong.append(f"{name!r} has no name; write parts as in {_PIN}")
        elif name not in known:
            wrong.append(f"there is no part {name!r}; {near_name(name, known)}there are {', '.join(known)}")
        elif not value:
            wrong.append(f"{name} has no value")
        elif name in parts:
            wrong.append(f"{name} is given twice")
        else:
            parts[name] = int(value) if name == "group" and re.fullmatch(r"-?[0-9]{1,18}", value) else value
    return parts, wrong


def listed(files: Collection[str], standalone: bool = False) -> str:
    """The files of a build: `conv.py conv_fc.py rank0.py..rank3.py launch.py plan.json weights.pt`."""
    ranks = [name for name in files if re.fullmatch(r"rank[0-9]+\.py", name)]
    last = ("launch.py", "plan.json")
    between = [] if not ranks else [ranks[0]] if len(ranks) == 1 else [f"{ranks[0]}..{ranks[-1]}"]
    names = [name for name in files if name not in (*ranks, *last)]
    return " ".join([*names, *between, *last, WEIGHTS, *(["splitc/"] if standalone else [])])


def parse_autocast(name: str | None) -> torch.dtype | None:
    """The dtype by name.  Raises LaunchError unless it is bfloat16 or float16."""
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise LaunchError(f"--autocast {name}: there are bfloat16 and float16")
    require_autocast(dtype)
    return dtype


def _plan(args: argparse.Namespace, path: Path) -> Plan:
    """The plan in a file.  Raises LaunchError when it is malformed or an option contradicts it."""
    plan = read_plan_file(path, args.world)
    decided = ("strategy", "microbatches", "pin", "accumulate", "global_batch", "wire", "wire_error")
    changed = [name for name in decided if getattr(args, name) != args.parser.get_default(name)]
    if given := [f"--{name.replace('_', '-')}" for name in changed]:
        raise LaunchError(f"{path} has decided everything already; leave out {', '.join(given)}")
    return plan


def watch(each: Pass[Any, Any], program: Program, seconds: float) -> None:
    """`-v`: print the program after a pass, on stderr."""
    print(f"# {each.name}: {seconds:.3f} s\n{print_program(program)}", file=sys.stderr)
