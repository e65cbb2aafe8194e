"""How often calibration finds that the ranks of a host share a line: two hosts of several ranks, each on one link.

    python -m benchmarks.shared_line --calibrations 20 --budget 10 --rate 100Mbit

Prints for each calibration what pairs at once took beside one message, and the flag; exits with 1 when one is wrong.
Only links are measured, since devices do not decide it.  Needs root, as every testbed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.layout import parse_rate
from benchmarks.testbed import NetworkTestbed

HOSTS = 2


def main() -> int:
    """Start the ranks of both hosts; the exit code is theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrations", type=int, default=20)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each, for links alone")
    parser.add_argument("--rate", default="100Mbit", help="of each host's link")
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        return _as_rank(args)
    again = ["-m", "benchmarks.shared_line", "--as-rank", "--calibrations", str(args.calibrations)]
    again += ["--budget", str(args.budget), "--ranks", str(args.ranks)]
    with NetworkTestbed(HOSTS, parse_rate(args.rate)) as testbed:
        ranks = [
            testbed.start(rank // args.ranks, [sys.executable, *again], of_host(rank, args.ranks), stderr=None)
            for rank in range(HOSTS * args.ranks)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        except subprocess.SubprocessError:
            codes = [1]
        print(f"other processes took {testbed.foreign_load():.0%} of the processors")
    return int(any(codes))


def of_host(rank: int, per_host: int, hosts: int = HOSTS) -> dict[str, str]:
    """What torchrun would set on a rank of several hosts, besides `NetworkTestbed.environment`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
    }


def _as_rank(args: argparse.Namespace) -> int:
    from splitc.cost_models.calibration.link_fit import fit_links
    from splitc.cost_models.calibration.links import measure_links
    from splitc.runtime.transport.distributed import init

    transport, found = init(), []
    for number in range(args.calibrations):
        samples = measure_links(transport, args.budget, ranks_per_host=args.ranks)
        fit = fit_links(samples)
        found.append(fit.links[0].shared)
        if transport.rank == 0:
            alone = {each.nbytes: each.seconds for each in samples.samples if each.ranks == (0, args.ranks)}
            pairs = {each.nbytes: each.seconds for each in samples.samples if each.kind == "pairs"}
            times = ", ".join(f"{n / 1e6:.2f} MB {pairs[n] / alone[n]:.2f}x" for n in pairs if n in alone)
            alike = len(set(map(id, fit.links)))
            print(
                f"{number + 1:3}  shared = {str(found[-1]).lower():5}  pairs {times}; {alike} kind of link", flush=True
            )
    if transport.rank == 0:
        print(f"found in {sum(found)} of {len(found)} calibrations", flush=True)
    transport.close()
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
