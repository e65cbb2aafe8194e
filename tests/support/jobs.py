"""Builds without a program, and what schedulers would run of them: shells, with stand-ins for what they call."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from splitc.ir.plan import Plan
from splitc.ir.prediction import Prediction

CONV_FC = {"conv": [0, 1, 2], "fc": [3]}

_SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
groups, codes = [[]], []
for word in sys.argv[1:]:
    groups.append([]) if word == ":" else groups[-1].append(word)
for group in groups:
    while group[0].startswith("--"):
        del group[0]
    codes.append(subprocess.Popen(group))
sys.exit(max(each.wait() for each in codes))
"""
_TORCHRUN = """#!/bin/sh
echo "$@" >> "$TOLD"
"""


def build_of(folder: Path, roles: Mapping[str, Sequence[int]], memory: Sequence[int] = (), per_host: int = 0) -> Plan:
    """Write the files of a build that `splitc run` looks at."""
    world = 1 + max(rank for ranks in roles.values() for rank in ranks)
    data = {
        "schema": 1,
        "strategy": "layer_separation",
        "world": world,
        "roles": roles,
        "placements": {role: {"role": role, "holding": "replicated", "sync": "all_reduce"} for role in roles},
        "examples": {
            role: [8 * k * world // len(ranks) for k in range(len(ranks) + 1)] for role, ranks in roles.items()
        },
    }
    plan = Plan.from_json(json.dumps(data))
    plan = replace(plan, prediction=Prediction(memory=tuple(memory), ranks_per_host=per_host))
    folder.mkdir()
    (folder / "plan.json").write_text(plan.to_json())
    parts = ["_".join(each) for each in plan.ranks_by_roles]
    for name in ("launch", *parts, *(f"rank{rank}" for rank in range(world))):
        (folder / f"{name}.py").write_text(f'PLAN = "{plan.hash}"\nlaunch.main(train, {world})\n')
    (folder / "weights.pt").touch()
    return plan


def torchruns(folder: Path, command: Sequence[str], **variables: str) -> list[dict[str, str]]:
    """The options that each torchrun gets when a command runs; srun starts all its groups here."""
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", _SRUN), ("torchrun", _TORCHRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    told = folder / "told"
    told.write_text("")
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TOLD": str(told)}
    subprocess.run(command, env={**path, **variables}, check=True, timeout=60, capture_output=True)
    lines = map(str.split, told.read_text().splitlines())
    return [dict(zip(line[:10:2], line[1:10:2], strict=True)) for line in lines]
