"""Ranks on two hosts, which are network namespaces: they meet, and a difference of the hosts is an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from splitc.compiled import CompiledProgram
from tests.support.compiled import compiled
from tests.support.hosts import own_lines, torchrun_on_both, two_hosts
from tests.support.launched import BATCH, SEPARATION, WORLD, Examples, Perceptron

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


def program(strategy: str = SEPARATION, world: int = WORLD) -> CompiledProgram:
    x, y = Examples()[:BATCH]
    return compiled(Perceptron(), (x,), y, F.cross_entropy, world, strategy)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("host0") / "build")


def assert_refused_once_on_each(ended: list[tuple[int, str, float]], text: str) -> None:
    for code, output, seconds in ended:
        assert code == 1
        assert own_lines(output) == [text], output
        assert seconds < 60  # the start of torch among it; SPLITC_TIMEOUT is 120


def test_two_hosts_train_without_being_told_their_interfaces(hosts: tuple[str, str], build: Path) -> None:
    first, second = torchrun_on_both(hosts, [build, build], "--steps", 2)
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert [line.split("  ")[0] for line in own_lines(first[1])] == ["step 1", "step 2"]


def test_an_interface_that_does_not_reach_the_other_host_is_named_in_the_error(
    hosts: tuple[str, str], build: Path
) -> None:
    first, second = torchrun_on_both(hosts, [build, build], GLOO_SOCKET_IFNAME="lo", SPLITC_TIMEOUT="10")
    assert (first[0], second[0]) == (1, 1)
    for output in (first[1], second[1]):
        assert "within 10 s over the interface lo (GLOO_SOCKET_IFNAME): " in output


def test_hosts_with_builds_of_different_plans_are_told_so_at_once(
    hosts: tuple[str, str], build: Path, tmp_path: Path
) -> None:
    other = program("data_parallel")
    ended = torchrun_on_both(hosts, [build, other.save(tmp_path / "build")])
    ours = program().plan.hash
    assert_refused_once_on_each(
        ended,
        f"error: the ranks must agree on the plan: rank 0 has '{ours}', rank 1 has '{other.plan.hash}'; "
        "copy one build to every host",
    )


def test_a_build_for_another_number_of_ranks_on_one_host_is_told_on_both(
    hosts: tuple[str, str], build: Path, tmp_path: Path
) -> None:
    ended = torchrun_on_both(hosts, [build, program("data_parallel", 3).save(tmp_path / "build")])
    assert_refused_once_on_each(
        ended,
        "error: the ranks must agree on the number of ranks of the build: rank 0 has 2, rank 1 has 3; "
        "copy one build to every host",
    )


def test_a_script_edited_and_weights_made_anew_on_one_host_are_told_on_both(
    hosts: tuple[str, str], build: Path, tmp_path: Path
) -> None:
    edited = tmp_path / "build"
    shutil.copytree(build, edited)
    text = (edited / "head.py").read_text()
    (edited / "head.py").write_text(f"{text}\n# edited\n")
    saved = torch.load(edited / "weights.pt", weights_only=True)
    saved["state"]["first.weight"] += 1
    torch.save(saved, edited / "weights.pt")
    for code, output, _ in torchrun_on_both(hosts, [build, edited]):
        assert code == 1
        first, second = own_lines(output)
        assert first.startswith("error: the ranks must agree on head.py: rank 0 has '")
        assert second.startswith("  the ranks must agree on weights.pt: rank 0 has '")
        assert second.endswith("; copy one build to every host")
