"""The clusters that come with splitc: their numbers, and where each is from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splitc.cost_models.clusters.files import known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import CostError
from splitc.ir.cluster_file import parse_cluster
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.layer_separation import LayerSeparation
from tests import ROOT
from tests.support.small_programs import candidate, place, separable

FOLDER = ROOT / "cost_models" / "clusters"
PAPERS = {
    "v100-10gbe", "v100-25gbe", "v100-40gbe", "v100-100gbe", "k80-2.6gbe", "k40-10gbe", "k40-56ib", "m40-10gbe",
    "m40-56ib", "ivybridge-56ib", "m5-10gbe",
}  # fmt: skip
TODAY = {
    "t4-pcie-50gbe", "a10-pcie-100gbe", "l4-pcie-100gbe", "v100-nvlink-25gbe", "a100-100gbe", "a100-nvlink-200ib",
    "a100-nvlink-400gbe", "h100-400gbe", "h100-nvlink-400ib", "h200-nvlink-400ib",
}  # fmt: skip


ETHERNET = {
    f"{host}-{rate}gbe" for host in ("rtx3090", "rtx4090", "a6000", "cpu16") for rate in ("1", "2.5", "10")
}  # fmt: skip
FILES = sorted(FOLDER.rglob("*.toml"))


def number_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if re.match(r"[\w.]+ *= *[\d\[]", line)]


def test_the_clusters_of_the_papers_and_those_of_today_ship() -> None:
    assert set(known_clusters()) == PAPERS | TODAY | ETHERNET | {"mixed-v100-t4"}


def test_every_cluster_can_be_loaded_and_tells_its_source() -> None:
    """Its network is that of its name, as bits a second; what InfiniBand's codes leave of it."""
    for name in known_clusters():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert "assumption" in cluster.source
        match = re.search(r"-([\d.]+)(gbe|ib)$", name)
        if match is not None and name != "k80-2.6gbe":
            nominal = float(match[1]) * 1e9 / 8
            assert 0.7 * nominal < cluster.link.bandwidth <= nominal, name


def test_every_number_says_where_it_is_from_and_an_assumption_what_it_rests_on() -> None:
    for file in FILES:
        lines = number_lines(file)
        assert len(lines) >= (2 if file.parent.name == "networks" else 7)
        assert all(re.search(r" # \S.{6,}$", line) for line in lines), file
        text = file.read_text()
        assert not re.search(r"# assumption\W*$", text, re.MULTILINE), file
        assert "local_link" not in text or re.search(r"^shared = (true|false) +# .", text, re.MULTILINE), file


def test_a_ready_cluster_is_a_device_with_a_link_where_its_name_is_made_of_both() -> None:
    slow, fast = load_cluster("rtx4090-1gbe"), load_cluster("rtx4090-2.5gbe")
    assert (slow.name, fast.name) == ("rtx4090-1gbe", "rtx4090-2.5gbe")
    assert slow.device == fast.device and slow.device.flop_rate["float32"] == 82.6e12
    assert (slow.link.bandwidth, fast.link.bandwidth) == (0.125e9, 0.3125e9)
    with pytest.raises(CostError, match=r"unknown cluster 'rtx4090-5gbe'; did you mean rtx4090-2\.5gbe"):
        load_cluster("rtx4090-5gbe")


def test_a_gpu_with_tf32_has_its_rate_and_says_so() -> None:
    """Half of what it has in bfloat16: NVIDIA's from Ampere on."""
    for name in known_clusters():
        cluster = load_cluster(name)
        rate = cluster.device.flop_rate
        assert ("tf32" in rate) == ("bfloat16" in rate) == ("in TF32" in cluster.source), name
        if "tf32" in rate:
            assert rate["tf32"] == pytest.approx(rate["bfloat16"] / 2, rel=0.01), name


def test_one_gpu_is_the_same_in_all_files() -> None:
    """But for the names that a file may give it, the numbers of a board do not depend on the network."""
    for names in (
        ("k40-10gbe", "k40-56ib"),
        ("m40-10gbe", "m40-56ib"),
        ("v100-10gbe", "v100-nvlink-25gbe", "mixed-v100-t4"),
        ("a100-100gbe", "a100-nvlink-200ib"),
        ("h100-nvlink-400ib", "h100-400gbe"),
    ):
        first, *others = (load_cluster(name).device for name in names)
        for other in others:
            assert (other.memory_bandwidth, other.memory, other.efficiency) == (
                first.memory_bandwidth, first.memory, first.efficiency
            )  # fmt: skip
            assert all(first.flop_rate[dtype] == rate for dtype, rate in other.flop_rate.items())
    assert load_cluster("mixed-v100-t4").unlike[0].device == load_cluster("t4-pcie-50gbe").device


def test_an_unknown_name_is_answered_with_a_near_one_and_all_others() -> None:
    with pytest.raises(CostError, match="did you mean v100-10gbe") as error:
        load_cluster("v100-10gb")
    assert "h100-400gbe" in str(error.value)
    assert "splitc calibrate" in str(error.value)


@pytest.mark.slow
def test_unequal_ranks_are_priced_by_the_slowest_of_them() -> None:
    """Four V100 and four T4: a plan of the first four knows nothing of the others."""
    mixed, fast = load_cluster("mixed-v100-t4"), load_cluster("v100-10gbe")
    assert mixed.device_for(4) is mixed.device
    assert mixed.device_for(8).flop_rate["float32"] == 8.1e12
    assert mixed.link_over((0, 3)).bandwidth == 1.25e9
    assert mixed.link_over((0, 4)).bandwidth == mixed.link_over(range(8)).bandwidth == 0.625e9
    program = separable()
    for strategy in (DataParallel(), LayerSeparation(n_c=6, n_f=2)):
        slow, usual = (place(program, 8, strategy, cluster) for cluster in (mixed, fast))
        assert slow.step_seconds > usual.step_seconds
        assert place(program, 4, DataParallel(), mixed).step_seconds == pytest.approx(
            place(program, 4, DataParallel(), fast).step_seconds
        )
    assert candidate(slow, "parameter_server").step_seconds > candidate(usual, "parameter_server").step_seconds


def test_the_docs_list_every_cluster_with_the_ranks_of_its_hosts() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    listed: dict[str, int] = {}
    for names, _, ranks in re.findall(r"^\| (`.*`) \| (.*) \| (\d+).* \|$", page, re.MULTILINE):
        listed |= dict.fromkeys(re.findall(r"`(.*?)`", names), int(ranks))
    assert listed == {name: load_cluster(name).ranks_per_host or 1 for name in known_clusters()}


def test_the_cluster_file_in_the_docs_is_read() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL | re.MULTILINE)
    cluster = parse_cluster(text, "clusters.md")
    assert cluster.device_of(12).memory == 32e9
    assert cluster.link_over((0, 4)).bandwidth == 0.625e9
    assert cluster.link_over(range(4)) == cluster.local_link
