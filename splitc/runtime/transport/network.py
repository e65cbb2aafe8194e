"""The network interface over which the ranks of several hosts reach each other.

gloo listens on the address that the host's name resolves to, which on many machines is 127.0.0.1 and then no other host
can reach.  The address that a packet to MASTER_ADDR leaves from is one that the others can.  NCCL looks for adapters by
itself, and may spread its data over several, so it is told only where it would choose wrongly.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from ..errors import LaunchError

with suppress(ImportError):  # of Unix alone
    import fcntl

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ANYWHERE = "192.0.2.1"  # of no host (RFC 5737); connecting a UDP socket sends nothing


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME, and NCCL's where needed, where the ranks are on several hosts and neither is set.

    Raises LaunchError, with the interfaces that there are, when none is found.
    """
    one_host, master = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"), os.environ.get("MASTER_ADDR")
    if one_host or not master or any(os.environ.get(name) for name in _VARIABLES) or not Path("/proc/net").exists():
        return
    try:
        found = socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR is {master}, which this host cannot resolve: {error}; give torchrun --master-addr an address"
        ) from error
    if ip_address(str(found[0][4][0])).is_loopback and "LOCAL_WORLD_SIZE" not in os.environ:
        return  # all of them are here
    interfaces = _interfaces()
    own = [_local_address(family, str(address[0])) for family, _, _, _, address in found]
    own += [_local_address(socket.AF_INET, _ANYWHERE)]  # on the master itself its name may mean 127.0.1.1
    for address in own:
        if (name := interfaces.get(address)) is not None and not ip_address(address).is_loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            if not _nccl_finds(name, list(dict.fromkeys(interfaces.values()))):
                os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # no other that begins alike
            return
    listed = ", ".join(f"{name} {address}" for address, name in interfaces.items()) or "none with an address"
    raise LaunchError(
        f"host {socket.gethostname()} has no network interface that reaches MASTER_ADDR {master}; its interfaces: "
        f"{listed}; name the right one in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every host"
    )


def _nccl_finds(name: str, interfaces: list[str]) -> bool:
    """Whether NCCL by itself begins with this interface or InfiniBand, and takes no others but adapters.

    It takes those that begin with "ib", or else all but loopback, docker's and libvirt's, in their order.
    """
    taken = [each for each in interfaces if each.startswith("ib")]
    taken = taken or [each for each in interfaces if not each.startswith(("lo", "docker", "virbr"))]
    begins = bool(taken) and (taken[0] == name or taken[0].startswith("ib"))
    return begins and all(each == name or _is_adapter(each) for each in taken)


def _is_adapter(interface: str) -> bool:
    return Path("/sys/class/net", interface, "device").exists()


def _local_address(family: int, peer: str) -> str:
    """The address that packets to `peer` leave from; empty where there is no route."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
    return ""


def _interfaces() -> dict[str, str]:
    """Address -> the interface of this host that has it."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ip_address(bytes.fromhex(digits)))] = name
    return found
