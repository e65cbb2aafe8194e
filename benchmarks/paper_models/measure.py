"""Train a model after its paper on ranks, and hold it against a plain loop and `verify`."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import splitc
from benchmarks.paper_models.case import PaperCase, papers
from benchmarks.real_models.declare import declare
from splitc.compiled import CompiledProgram
from splitc.errors import SplitcError
from tests.support.random_runs import STEPS, Run
from tests.support.random_training import differences

PLANS = (("data_parallel", 2), ("auto", 4))
CLUSTER = "v100-10gbe"


@dataclass(frozen=True)
class Trained:
    """A model under a strategy.  error: of verify.  wrong, refused: else why not."""

    strategy: str
    plan: str = ""
    error: float | None = None
    wrong: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Result:
    """A model under all strategies.  kind: the file of `zoo/` that it is in, as words."""

    name: str
    kind: str
    trained: tuple[Trained, ...]
    seconds: float

    @property
    def trains(self) -> bool:
        """Whether it trains as in a plain loop under every strategy."""
        return all(each.error is not None and not each.wrong for each in self.trained)


def measured(name: str) -> Result:
    """Train a model under every strategy."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    paper, begin = papers()[name], time.process_time()
    if paper.package:
        declare()
    trained = tuple(_trained(name, strategy, world) for strategy, world in PLANS)
    return Result(name, paper.kind, trained, time.process_time() - begin)


def _trained(name: str, strategy: str, world: int) -> Trained:
    paper = papers()[name]
    torch.manual_seed(1)
    case = PaperCase(paper, paper.make().double())
    inputs, target = case.batch(paper.examples, 0)
    asked = f"{strategy}(sync_batchnorm=True)" if case.normalises_the_batch else strategy
    found = Trained(strategy)
    try:
        options = {"cluster": CLUSTER, "strategy": asked, **paper.options}
        program = splitc.compile(case.model, world, inputs, target, paper.loss, **options)
        assert isinstance(program, CompiledProgram)
        found = replace(found, plan=program.plan.strategy)
        holds = program.verify(steps=2, examples=3)
        error = max(holds.loss_error, holds.gradient_error, holds.parameter_error)
        wrong = () if holds.holds else (f"verify: {holds.where} {holds.worst}",)
        return replace(
            found, error=error, wrong="; ".join([*wrong, *differences(case, program, _run(case, program))][:3])
        )
    except SplitcError as error:
        return replace(found, refused=" ".join(f"{type(error).__name__}: {error}".split())[:400])
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return replace(found, wrong=f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"[:300])


def _run(case: PaperCase, program: CompiledProgram) -> Run:
    local = program.plan.local_batches
    uneven = tuple(size + k % 2 for k, size in enumerate(local))
    sizes = tuple((None, uneven)[step % 2] for step in range(STEPS))
    optimizer = "plain sgd" if case.is_sparse else "adam"
    return Run(program.plan.strategy, program.plan.world, None, {}, optimizer, 1, None, sizes)
