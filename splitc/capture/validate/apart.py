"""Run a captured graph on three examples and on parts of them, node by node.

What holds examples must hold the same ones in the parts; a node that does not couples examples.  From there on nothing
is compared.  Where nothing couples, the terms of the loss are sums and means, as measured.  Values are freed as soon as
nothing reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from splitc.capture.example.division import examples_of
from splitc.capture.in_batch import readers_of_kept
from splitc.capture.loss_terms import LossTerms, is_aggregate, is_weighted_mean
from splitc.capture.regions.region_flow import Couples, ran
from splitc.capture.source_lines import first_line
from splitc.capture.validate.reference_copy import ReferenceCopy, is_layer
from splitc.capture.validate.rows import outer_rows, peak
from splitc.errors import CaptureError
from splitc.ir.elementwise import is_elementwise
from splitc.ir.graph import has_examples, info, is_region
from splitc.ir.interpreter import NodeHook, NodeRunner
from splitc.ir.layers import LossTerm
from splitc.ir.program import Program, TensorSpec
from splitc.runtime.collectives.loss import target_weight

EXAMPLES = 3
PARTS = ((0, 1, 2), (0,), (1, 2), (2,), (0, 1))
_CHOICES = ((1, 2), (3, 4))  # of PARTS: these two make the whole
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)  # the first one in evaluation mode
_POOLS = (
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
)  # fmt: skip
_ORDERS = ((0, 1, 2), (2, 0, 1))


class NotFinite(Exception):
    """A term of the loss is not finite, or all targets are ignored."""


@dataclass
class Apart:
    """What the run of a graph on parts has shown.

    couplings: nodes where examples begin to depend on each other, and why.  values, weights: of each term and
    denominator, on the whole and on the parts; the weight is the sum of the targets' weights in a weighted mean.
    guess: linear layers and convolutions that map each example by itself are not run; they return random numbers.
    """

    program: Program
    terms: LossTerms
    allowed: float
    guess: bool = False
    couplings: dict[fx.Node, str] = field(default_factory=dict)
    values: dict[fx.Node, list[float]] = field(default_factory=dict)
    weights: dict[fx.Node, list[float]] = field(default_factory=dict)
    flattened: dict[fx.Node, int] = field(default_factory=dict)  # see `Program`
    _draws: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.couplings.update(readers_of_kept(self.program) | self.terms.couplings)

    def run(self, reference: ReferenceCopy, tensors: Mapping[str, Tensor], noise: bool = False) -> None:
        """noise: is added to what is summed over examples, where a term is 0 without it."""
        runners = [NodeRunner(reference.root, self.program.graph) for _ in PARTS]
        for runner, rows in zip(runners, PARTS, strict=True):
            values = reference.values(examples_of(self.program, tensors, rows[0], rows[-1] + 1))
            placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
            runner.args_iter = iter([values[str(n.target)] for n in placeholders])
        tainted, needed = set(self.couplings), self._needed()
        with reference.running(apart=True), torch.no_grad():
            for node in self.program.graph.nodes:
                if node.op == "output":
                    return
                if node not in needed:
                    continue
                if not tainted.isdisjoint((node, *node.all_input_nodes)):
                    tainted.add(node)
                    continue
                is_known, spec = self._is_known(node), info(node).spec  # so all parts have the rounding of the whole
                is_narrow = is_known and isinstance(spec, TensorSpec) and spec.dtype is not torch.float64
                reference.standing.layers = torch.float32 if is_narrow else torch.float64
                self._run_node(node, runners, noise, is_known)
                if node in self.couplings:
                    tainted.add(node)
                for runner in runners:
                    for dead in runner.user_to_last_uses.get(node, []):
                        runner.env.pop(dead, None)

    def _run_node(self, node: fx.Node, runners: list[NodeRunner], noise: bool, is_known: bool) -> None:
        values: list[Any] = []
        for k, runner in enumerate(runners):
            try:
                if k and is_known:
                    value = self._rows(node, values[0], k)
                elif is_known and self._is_guessed(node):
                    value = _guessed(node)
                elif is_region(node):
                    whole = self.program.part is None
                    value = ran(node, runner, whole and not k, self.flattened, self._draws if whole else None)
                else:
                    value = runner.run_node(node)
            except Couples as error:
                self.couplings[node] = str(error)
                return
            except Exception as error:
                what = f"{info(node).source}: {node.name} fails on {len(PARTS[k])} examples: {first_line(error)}"
                if k == 0:
                    raise error if isinstance(error, CaptureError) else CaptureError(what) from error
                self.couplings[node] = f"{what}; ranks may have as few"
                return
            self._note(node, runner, value)
            values.append(value)
            runner.env[node] = values[0] if self.terms.uses.get(node) == "denominator" else value  # as ranks have it
        if len(values) == len(PARTS) and node in self.terms.upstream:
            if not is_known:
                self._compare(node, values, [runners[0].env.get(n) for n in node.all_input_nodes])
            if noise and isinstance(values[0], Tensor) and self._is_summed(node):
                for runner, value in zip(runners, _noisy(node, values), strict=True):
                    runner.env[node] = value

    def _is_known(self, node: fx.Node) -> bool:
        """Whether a torch op maps each example of dim 0 by itself, so that parts need no run."""
        spec, operands = info(node).spec, [n for n in node.all_input_nodes if n in self.terms.batched]
        module = self.program.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if is_layer(node, self.program.root) or isinstance(module, _NORMS):
            is_torchs = operands == [*node.args[:1]]
        else:
            is_torchs = is_elementwise(node) or node.target in _POOLS
        if not is_torchs or not isinstance(spec, TensorSpec) or spec.batch_dim != 0:
            return False
        found = [info(n).spec for n in operands if n in self.terms.data and n not in self.flattened]
        alike = [s for s in found if isinstance(s, TensorSpec) and s.batch_dim == 0 and len(s.shape) == len(spec.shape)]
        return len(alike) == len(operands) > 0 and all(s.rows == spec.rows for s in alike)

    def _is_guessed(self, node: fx.Node) -> bool:
        spec = info(node).spec
        is_real = isinstance(spec, TensorSpec) and spec.dtype.is_floating_point
        return self.guess and is_real and is_layer(node, self.program.root)

    def _needed(self) -> set[fx.Node]:
        """The nodes whose values are compared, and what they are computed from."""
        needed = set[fx.Node]()
        for node in reversed(self.program.graph.nodes):
            is_known = self.guess and self._is_known(node)
            if node in needed or not is_known:
                needed.add(node)
                needed.update(() if is_known and self._is_guessed(node) else node.all_input_nodes)
        return needed

    def _rows(self, node: fx.Node, whole: Tensor, part: int) -> Tensor:
        rows = info(node).spec
        assert isinstance(rows, TensorSpec)
        return whole.narrow(0, PARTS[part][0] * rows.rows, len(PARTS[part]) * rows.rows)

    def _note(self, node: fx.Node, runner: NodeRunner, value: Any) -> None:
        if node not in self.terms.uses:
            return
        weight = 1.0
        if is_weighted_mean(node):
            options: Any = runner.map_nodes_to_values(dict(node.kwargs), node)
            target = runner.env[node.all_input_nodes[1]]
            weight = float(target_weight(target, options.get("weight"), options.get("ignore_index", -100)))
        self.values.setdefault(node, []).append(float(value))
        self.weights.setdefault(node, []).append(weight)

    def _is_summed(self, node: fx.Node) -> bool:
        return has_examples(node) and any(is_aggregate(user) for user in node.users)

    def _compare(self, node: fx.Node, values: list[Any], inputs: list[Any]) -> None:
        spec, whole = info(node).spec, values[0]
        if not isinstance(whole, Tensor) or (node.op == "placeholder" and self.program.part is not None):
            return
        is_number = not (whole.is_floating_point() or whole.is_complex() or whole.dtype == torch.bool)
        is_data = node in self.terms.data
        if spec is None and is_data:
            self._couple(node, f"{node.name} has the batch in several dimensions, or in a part of one")
        elif spec is None and is_number:
            self.flattened[node] = 0  # positions of examples
        if not isinstance(spec, TensorSpec) or spec.batch_dim is None:
            return
        outers = [
            outer_rows(whole, [values[k] for k in choice], order, spec, lambda: self._allowed(whole, inputs))
            for choice, order in zip(_CHOICES, _ORDERS, strict=True)
        ]
        if all(outers):
            self.flattened.update({node: outers[0]} if outers[0] != 1 else {})
            return
        counted = is_number and any(self._changes(n) for n in node.all_input_nodes)
        if not is_data or counted or (self.terms.is_scaling(node) and self._reads_change(node)):
            self.flattened[node] = 0
        else:
            self._couple(
                node,
                f"what {node.name} makes of an example depends on the other examples of its batch; a rank that sees a "
                f"part of the batch cannot compute it",
            )

    def _allowed(self, whole: Tensor, inputs: list[Any]) -> float:
        """The rounding error allowed in a value: also of a difference of large inputs."""
        return self.allowed * (peak(whole) + 1e-3 * max(map(peak, inputs), default=0.0))

    def _reads_change(self, node: fx.Node) -> bool:
        """Whether the node reads the batch size, or what was scaled by it."""
        return any(self._changes(n) or n not in self.terms.data for n in node.all_input_nodes)

    def _changes(self, node: fx.Node) -> bool:
        """Whether the value of an example differs from part to part, which what reads it must make good."""
        return self.flattened.get(node) == 0

    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The terms and their kinds; notes a coupling for each that is neither a sum nor a mean.

        Raises NotFinite.
        """
        uses = {} if self.couplings else self.terms.uses
        found = tuple(LossTerm(node.name, self._kind(node, use)) for node, use in uses.items())
        return found if not self.couplings else ()

    def scaled(self, part: int) -> NodeHook:
        """A hook that scales the terms over a part of the batch as a rank that has it does."""
        kinds = {term.node: term.kind for term in self.loss_terms()}

        def scale(node: fx.Node, run: Callable[[], Any]) -> Any:
            value, kind = run(), kinds.get(node.name, "")
            if not isinstance(value, Tensor) or node.name not in kinds:
                return value
            if kind.endswith("denominator"):
                return torch.full_like(value, self.values[node][0])
            weights = self.weights[node]
            shares = {"mean": len(PARTS[part]) / EXAMPLES, "weighted": weights[part] / weights[0], "sum": 1.0}
            return value * shares[kind]

        return scale

    def _couple(self, node: fx.Node, why: str) -> None:
        self.couplings[node] = f"{info(node).source}: the loss couples examples: {why}"

    @property
    def unseen(self) -> list[fx.Node]:
        """Terms that are 0 on the whole and on every part."""
        terms = self.terms.batched & self.values.keys()
        return [n for n in terms if not is_weighted_mean(n) and not any(self.values[n])]

    def _kind(self, node: fx.Node, use: str) -> str:
        if node not in self.terms.batched:
            return "mean"  # the same on every rank, which counts by its share of the batch
        values, weights = self.values[node], self.weights[node]
        if not all(math.isfinite(v) for v, w in zip(values, weights, strict=True) if w) or not weights[0]:
            raise NotFinite(node.name)
        suffix = "" if use == "term" else " denominator"
        for kind in ("weighted",) if is_weighted_mean(node) else ("mean", "sum"):
            examples = [float(len(part)) for part in PARTS]
            shares = {"weighted": weights, "mean": examples, "sum": [1.0] * len(PARTS)}[kind]
            scaled = [v * w if w else 0.0 for v, w in zip(values, shares, strict=True)]
            largest = max(map(abs, scaled))
            if all(abs(scaled[0] - scaled[a] - scaled[b]) <= self.allowed * largest for a, b in _CHOICES):
                return kind + suffix
        self._couple(
            node,
            f"{node.name} is {values[0]:.6g} over 3 examples, {values[1]:.6g} over the first and {values[2]:.6g} over "
            f"the other two, neither their sum nor their mean; a rank that sees a part of the batch cannot compute it "
            f"(use a loss that is a sum, a mean or a weighted mean over examples)",
        )
        return ""


def _guessed(node: fx.Node) -> Tensor:
    """Random numbers in place of what a layer returns."""
    spec, generator = info(node).spec, torch.Generator().manual_seed(len(node.name))
    assert isinstance(spec, TensorSpec)
    return torch.randn(spec.at(EXAMPLES), dtype=torch.float64, generator=generator)


def _noisy(node: fx.Node, values: list[Tensor]) -> list[Tensor]:
    """The values with the same noise for the same example."""
    spec = info(node).spec
    assert isinstance(spec, TensorSpec) and spec.batch_dim is not None
    drawn = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = (drawn if values[0].is_floating_point() or values[0].is_complex() else drawn > 0).to(values[0])
    split = noise.unflatten(spec.batch_dim, (EXAMPLES, spec.rows))
    parts = [split.index_select(spec.batch_dim, torch.tensor(rows, device=noise.device)) for rows in PARTS]
    add = torch.logical_xor if values[0].dtype == torch.bool else torch.add
    return [add(value, part.reshape(value.shape)) for value, part in zip(values, parts, strict=True)]
