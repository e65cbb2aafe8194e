"""The interface that gloo and NCCL are told to use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from splitc.errors import LaunchError
from splitc.runtime.transport import network
from splitc.runtime.transport.network import choose_interface

Start = Callable[..., None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Set the environment of a rank, whose host has two interfaces and sends everything over the second."""

    def set_environment(master: str = "192.0.2.7", here: int | None = 2, **more: str) -> None:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")
        given = {"WORLD_SIZE": "4", "MASTER_ADDR": master, **more}
        if here is not None:
            given["LOCAL_WORLD_SIZE"] = str(here)
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    def leaving(family: int, peer: str) -> str:
        return "127.0.0.1" if peer.startswith("127") else "192.0.2.9"

    monkeypatch.setattr(network, "_local_address", leaving)
    monkeypatch.setattr(network, "_interfaces", lambda: {"127.0.0.1": "lo", "10.0.0.9": "eth0", "192.0.2.9": "eth1"})
    return set_environment


def chosen() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_the_interface_that_reaches_the_master_is_chosen(start: Start) -> None:
    start()
    choose_interface()
    assert chosen() == ("eth1", "=eth1")


@pytest.mark.parametrize(
    ("there", "pinned"),
    [
        ({"127.0.0.1": "lo", "192.0.2.9": "eth1", "10.0.0.9": "eth2"}, None),
        ({"172.17.0.1": "docker0", "192.0.2.9": "eth1", "fe80::1": "eth1"}, None),
        ({"192.0.2.9": "eth1", "10.0.0.9": "ib0"}, None),
        ({"192.0.2.9": "eth1", "172.18.0.1": "br-3f0c"}, "=eth1"),  # a bridge that NCCL takes for an adapter
        ({"10.0.0.9": "eth0", "192.0.2.9": "eth1"}, "=eth1"),  # with which NCCL would begin
        ({"127.0.0.1": "lo", "192.0.2.9": "docker0"}, "=docker0"),
    ],
)
def test_nccl_is_left_to_its_own_adapters_where_they_reach_the_master(
    start: Start, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], pinned: str | None
) -> None:
    start()
    monkeypatch.setattr(network, "_interfaces", lambda: there)
    monkeypatch.setattr(network, "_is_adapter", lambda name: name[:2] in ("et", "ib"))
    choose_interface()
    assert chosen() == (there["192.0.2.9"], pinned)


def test_a_master_that_calls_itself_a_loopback_address_takes_the_interface_of_its_route(start: Start) -> None:
    start(master="127.0.1.1")
    choose_interface()
    assert chosen() == ("eth1", "=eth1")


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_the_user_names_stays(start: Start, name: str) -> None:
    start(**{name: "eth0"})
    choose_interface()
    assert sorted(filter(None, chosen())) == ["eth0"]


def test_nothing_is_chosen_on_one_host_or_without_a_master(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(here=4)
    choose_interface()
    start(master="127.0.0.1", here=None)
    choose_interface()
    start()
    monkeypatch.delenv("MASTER_ADDR")  # a group that was not made from the environment
    choose_interface()
    assert chosen() == (None, None)


def test_a_host_without_a_way_to_the_master_lists_its_interfaces(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(network, "_local_address", lambda family, peer: "")
    with pytest.raises(LaunchError) as caught:
        choose_interface()
    text = "has no network interface that reaches MASTER_ADDR 192.0.2.7; its interfaces: lo 127.0.0.1, eth0 10.0.0.9, "
    caught.match(re.escape(text))
    caught.match("name the right one in GLOO_SOCKET_IFNAME")


def test_a_master_that_has_no_address_is_named(start: Start) -> None:
    start(master="no-such-host.invalid")
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is no-such-host\.invalid, which this host cannot resolve"):
        choose_interface()


def test_the_loopback_interface_is_found_by_its_address() -> None:
    assert network._interfaces()["127.0.0.1"] == "lo"
    assert network._local_address(2, "127.0.0.1") == "127.0.0.1"
