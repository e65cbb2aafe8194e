"""Ranks on two hosts, which are network namespaces: they meet, and a difference of the hosts is an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.hosts import own_lines, torchrun_on_both, two_hosts
from tests.support.launched import program

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("host0") / "build")


def test_two_hosts_train_without_being_told_their_interfaces(hosts: tuple[str, str], build: Path) -> None:
    first, second = torchrun_on_both(hosts, [build, build], "--steps", 2)
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert [line.split("  ")[0] for line in own_lines(first[1])] == ["step 1", "step 2"]


def test_an_interface_that_does_not_reach_the_other_host_is_named_in_the_error(
    hosts: tuple[str, str], build: Path
) -> None:
    first, second = torchrun_on_both(hosts, [build, build], GLOO_SOCKET_IFNAME="lo", SPLITC_TIMEOUT="1")
    assert (first[0], second[0]) == (1, 1)
    for output in (first[1], second[1]):
        assert "within 1 s over the interface lo (GLOO_SOCKET_IFNAME): " in output


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
