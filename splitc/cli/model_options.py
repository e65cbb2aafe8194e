"""The options of commands that plan a model.  Quick to load: no torch."""

from __future__ import annotations

from pathlib import Path

from splitc.cli.parser import Add, memory, seconds
from splitc.runtime.launch.options import positive

_MODEL = "path/model.py[:name] or package.module:name"


def attempt(add: Add) -> None:
    """Plan a model, verify it, and train ten steps on this machine."""
    of_one_model(add, plan=False, world=2)


def inspect(add: Add) -> None:
    """Show the best placement of a model, what it costs, and why."""
    of_one_model(add)
    _ladder(add)
    _require(add)
    add("--json", action="store_true", help="print the report as JSON (schema 1)")
    _html(add)
    add("--all", action="store_true", help="show every layer, also blocks that repeat")


def explain(add: Add) -> None:
    """Show what other placements of a layer would cost, and where the choice flips."""
    of_one_model(add, plan=False)
    add("layer", nargs="?", help="a layer's name, or a pattern of names, whose layers are placed alike: 'classifier.*'")
    add("--sensitivity", action="store_true", help="in place of a layer: where another plan is chosen")
    add("--buy", action="store_true", help="in place of a layer: what a faster network, a host, memory, a plan gain")
    add("--json", action="store_true", help="print the figures as JSON (schema 1)")


def compile(add: Add) -> None:
    """Write the per-rank scripts of a model."""
    of_one_model(add)
    add("-o", "--output", metavar="FOLDER", default="build", help="where to write them (default: build)")
    _ladder(add)
    _require(add)
    add("--standalone", action="store_true", help="copy the runtime beside the scripts: they need torch alone")


def tune(add: Add) -> None:
    """Run the plans that may be the fastest for some seconds each, and write the scripts of the best."""
    of_one_model(add, plan=False)
    add("-o", "--output", metavar="FOLDER", default="build", help="where to write the fastest (default: build)")
    add("--finalists", type=positive, default=6, metavar="N", help="different plans to run, at most (default 6)")
    add("--budget", type=seconds, default=60.0, metavar="SECONDS", help="how long they run, about (default 60)")
    add("--hosts", metavar="A,B:2", help="run on these hosts over ssh, as splitc run does; :2 are ranks of one")
    _html(add)
    add("--again", action="store_true", help="run them also where it is known which is the fastest on these hosts")


def verify(add: Add) -> None:
    """Show that the ranks train exactly as one process does."""
    of_one_model(add)
    add("--processes", action="store_true", help="real processes under torchrun instead of simulated ranks")
    add("--steps", type=positive, default=3, metavar="N", help="training steps (default 3)")
    add("--examples", type=positive, metavar="N", help="at most so many examples for each reader (default 8)")
    precision = "precision, without autocast; float64 proves the algebra (default: the model's)"
    add("--dtype", choices=("float32", "float64"), help=precision)
    add("--compile-stages", action="store_true", help="the ranks run their stages under torch.compile")
    add("--json", action="store_true", help="print the result as JSON")


def simulate(add: Add) -> None:
    """Predict throughput over worlds, bandwidths and strategies."""
    add("models", nargs="+", metavar="model", help=_MODEL)
    _plan(add)
    add("--world", default="", metavar="N", help="8, or 4,8,16, or 5:80 for at most 16 worlds of it, or 5:80:5")
    add("--bandwidth", metavar="RATES", help="bits per second between hosts, 25g,40g,100g (default: the cluster's)")
    strategies = "separated by commas (default: data_parallel,layer_separation, or the plan alone)"
    add("--strategies", metavar="NAMES", help=strategies)
    add("--against", metavar="STRATEGY", help="show what the others gain over this one")
    cluster = "whose devices and links: a known cluster, a .toml file or this-machine (default: v100-10gbe)"
    add("--cluster", default="v100-10gbe", metavar="NAME", help=cluster)
    add("--accumulate", type=positive, default=1, metavar="N", help="batches to an update (default: 1)")
    _wire(add)
    _global_batch(add)
    add("--input", metavar="SIZES", help="an example of these sizes, as for splitc compile")
    add("--trace", metavar="FILE", help="write the timeline of one plan as Chrome trace JSON (Perfetto)")
    add("--json", action="store_true", help="print all figures as JSON")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _plan(add: Add) -> None:
    add("--plan", metavar="PLAN", help="follow this plan.json, or that of a build; --cluster prices it anew")


def _global_batch(add: Add) -> None:
    text = "examples of a step over all ranks (default: the example's for each reader)"
    add("--global-batch", type=positive, metavar="N", help=text)


def _ladder(add: Add) -> None:
    add("--min-world", type=positive, metavar="N", help="plan for fewer ranks too, one by one down to N")


def _require(add: Add) -> None:
    text = "'samples/s>=400', 'step<=50ms', 'x DDP>=2', 'memory<=16GB', 'sends<=10MB'; else exit code 1; repeatable"
    add("--require", action="append", default=[], metavar="BOUND", help=text)


def _html(add: Add) -> None:
    add("--html", type=Path, metavar="FILE", help="write the report as one page, with other plans of half a minute")


def _wire(add: Add) -> None:
    text = "approximate: numbers travel in bf16, fp16, int8 or fp8, all or by kind, "
    text += "activations=bf16,errors=bf16,gradients=int8 (default: as computed)"
    add("--wire", metavar="FORMATS", help=text)


def of_one_model(add: Add, plan: bool = True, world: int | None = None) -> None:
    """Those of one model.  plan: it may follow one.  world: how many ranks, unless given."""
    add("model", help=_MODEL)
    if plan:
        _plan(add)
    ranks = f"how many ranks{f' (default {world})' * bool(world)}"
    add("--world", type=positive, default=world, required=not (plan or world), metavar="N", help=ranks)
    cluster = "a known cluster (see splitc clusters) or a .toml file; inspect: also several; default: this machine"
    add("--cluster", metavar="NAME", help=cluster)
    add(
        "--strategy",
        default="auto",
        help="auto, single_device, data_parallel, parameter_server, layer_separation, hybrid_single, late_multiply, "
        "modulo_shard, mixed; approximate: local_sgd, sites, independent_subnets; with options as in "
        '"layer_separation(n_c=3, n_f=1)" (default: auto, the fastest exact one)',
    )
    parts = "parts of each reader's batch, one after another (default: as the strategy chooses)"
    add("--microbatches", type=positive, metavar="M", help=parts)
    add(
        "--pin",
        action="append",
        default=[],
        metavar="PATTERN=PLACEMENT",
        help="fix where the layers that match are placed: a role, 'classifier.*=fc', or parts by name, "
        "'classifier.1=holding:sharded,group:2' (role, holding, sync, group, split, state, arrives); the later one "
        "counts, part by part; may be repeated",
    )
    add("--accumulate", type=positive, default=1, metavar="N", help="batches to an update, at most (default: 1)")
    _global_batch(add)
    add("--memory", type=memory, metavar="SIZE", help="memory of a rank, in place of the cluster's: 16GB, 40GiB")
    mixed = "mixed precision: bfloat16 or float16 runs every forward under torch.autocast"
    add("--autocast", metavar="DTYPE", help=mixed)
    _wire(add)
    add("--wire-error", type=float, metavar="E", help="approximate: in formats with errors of gradients below E: 1e-2")
    sizes = "an example of these sizes, 4x3x224x224, or of this batch, 4; one for each input, separated by commas"
    add("--input", metavar="SIZES", help=sizes)
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    add("-v", "--verbose", action="store_true", help="time every pass and print the program after it")
