"""Cluster files: what they must say, and what is said when they do not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import ArgumentError, CostError
from splitc.ir.cluster import Unlike
from splitc.ir.cluster_file import digest, parse_cluster, to_toml
from splitc.ir.device import COLLECTIVES, DTYPES, EFFICIENCIES, Link, Rate
from tests.support.random_clusters import random_cluster
from tests.support.small_programs import small_cluster

GOOD = """\
name = "toy"
source = ""
ranks_share_device = false

[device]
name = "toy"
memory_bandwidth = 1e6
memory = 1e9
launch = 0.0
conv_launch = 0.0
overlap = 1.0
flop_rate.float32 = 1e6
efficiency.matmul = 1.0
efficiency.memory = 1.0

[link]
bandwidth = 1e6
latency = 1e-4
duplex = true
shared = false
processor = 0.0
"""
HOSTS = GOOD.replace("\n[device]", "ranks_per_host = 8\n\n[device]") + "\n[local_link]\nbandwidth = 1e9\nlatency = 0\n"


def edited(pattern: str, new: str) -> str:
    text, count = re.subn(pattern, new, GOOD, flags=re.MULTILINE)
    assert count == 1
    return text


def refused(text: str) -> str:
    """The problems of a text, one a line."""
    with pytest.raises(CostError) as error:
        parse_cluster(text, "mine.toml")
    return str(error.value)


# -- there and back ----------------------------------------------------------------------------------------------------


def test_any_cluster_written_as_toml_reads_back_equal() -> None:
    for cluster in map(random_cluster, range(30)):
        assert parse_cluster(to_toml(cluster), "text") == load_cluster(cluster) == cluster


def test_a_path_is_read_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_cluster(path) == load_cluster(str(path)) == small_cluster()


def test_every_key_of_the_device_is_read() -> None:
    rates = "\n".join(f"flop_rate.{dtype} = {k}e9" for k, dtype in enumerate(DTYPES, start=1))
    parts = "\n".join(f"efficiency.{name} = 0.{k:02}" for k, name in enumerate(EFFICIENCIES, start=1))
    text = re.sub(r"^flop_rate.*$", rates, GOOD, flags=re.MULTILINE)
    text = re.sub(r"^efficiency.matmul.*\nefficiency.memory.*$", parts, text, flags=re.MULTILINE)
    device = parse_cluster(text, "mine.toml").device
    assert device.flop_rate == {dtype: k * 1e9 for k, dtype in enumerate(DTYPES, start=1)}
    assert device.efficiency == {name: k / 100 for k, name in enumerate(EFFICIENCIES, start=1)}


def test_every_key_of_a_link_is_read() -> None:
    keys = "bandwidth = 2e9\nlatency = 3e-6\nduplex = false\nshared = true\nprocessor = 1e-10\n"
    keys += "\n".join(f"{name}.bandwidth = {k}e9\n{name}.latency = {k}e-6" for k, name in enumerate(COLLECTIVES, 1))
    link = parse_cluster(GOOD.partition("[link]")[0] + f"[link]\n{keys}", "mine.toml").link
    rates = {name: Rate(k * 1e9, float(f"{k}e-6")) for k, name in enumerate(COLLECTIVES, start=1)}
    assert link == Link(2e9, 3e-6, duplex=False, shared=True, processor=1e-10, collectives=rates)


def test_what_a_link_leaves_out_is_the_usual() -> None:
    text = GOOD.partition("[link]")[0] + "[link]\nbandwidth = 1e9\nlatency = 0"
    assert parse_cluster(text, "mine.toml").link == Link(1e9, 0.0, duplex=True, shared=False, processor=0.0)


def test_hosts_and_cores_are_read() -> None:
    cluster = parse_cluster(HOSTS.replace("ranks_share_device = false", "ranks_share_device = true\ncores = 4"), "mine")
    assert (cluster.ranks_per_host, cluster.local_link) == (8, Link(1e9, 0.0))
    assert (cluster.ranks_share_device, cluster.cores) == (True, 4)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def test_unlike_ranks_have_what_is_given_and_the_rest_of_the_others() -> None:
    text = GOOD + "\n[[unlike]]\nranks = [5, 2]\ndevice.memory = 3e9\n\n[[unlike]]\nranks = [1]\nlink.latency = 0.5\n"
    usual = small_cluster()
    assert parse_cluster(text, "mine").unlike == (
        Unlike((2, 5), replace(usual.device, memory=3e9), usual.link),
        Unlike((1,), usual.device, replace(usual.link, latency=0.5)),
    )


def test_a_table_of_unlike_ranks_stands_in_place_of_the_whole_other_one() -> None:
    """A device without bfloat16 does not get it from the device of the other ranks."""
    text = GOOD.replace("flop_rate.float32", "flop_rate.bfloat16 = 9e9\nflop_rate.float32")
    (unlike,) = parse_cluster(text + "\n[[unlike]]\nranks = [1]\ndevice.flop_rate.float32 = 1e5\n", "mine").unlike
    assert unlike.device.flop_rate == {"float32": 1e5}
    (unlike,) = parse_cluster(text + "\n[[unlike]]\nranks = [1]\ndevice.memory = 1e5\n", "mine").unlike
    assert set(unlike.device.flop_rate) == {"float32", "bfloat16"}


def test_what_collectives_reach_is_not_taken_over_to_a_link_of_another_speed() -> None:
    text = GOOD + "all_reduce.bandwidth = 1e5\nall_reduce.latency = 0\n\n[[unlike]]\nranks = [1]\n"
    for own, measured in (("bandwidth = 1e3", False), ("latency = 1", False), ("processor = 1e-9", True)):
        (unlike,) = parse_cluster(f"{text}link.{own}\n", "mine").unlike
        assert ("all_reduce" in unlike.link.collectives) == measured


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_cluster_made_by_hand_is_checked_like_a_file() -> None:
    assert load_cluster(small_cluster()) == small_cluster()
    with pytest.raises(ArgumentError, match=r"Link: bandwidth is -1\.0"):
        load_cluster(small_cluster(bandwidth=-1.0))
    with pytest.raises(ArgumentError, match=r"Device: memory is nan"):
        load_cluster(small_cluster(memory=float("nan")))
    usual = small_cluster()
    with pytest.raises(ArgumentError, match=r"Unlike: ranks is \(\)"):
        load_cluster(replace(usual, unlike=(Unlike((), usual.device, usual.link),)))
    with pytest.raises(ArgumentError, match=r"Link: collectives: broadcast is an unknown key"):
        load_cluster(replace(usual, link=replace(usual.link, collectives={"broadcast": Rate(1.0, 1.0)})))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(CostError, match=r"cannot read the cluster file nowhere\.toml"):
        load_cluster("nowhere.toml")


def test_a_missing_number_names_file_key_and_what_to_do() -> None:
    for key in (
        "memory_bandwidth",
        "memory",
        "launch",
        "efficiency.matmul",
        "efficiency.memory",
        "bandwidth",
        "latency",
    ):
        message = refused(edited(f"^{key} = .*$", ""))
        assert message.startswith("mine.toml does not describe a cluster")
        section = "link" if key in ("bandwidth", "latency") else "device"
        assert f"{section}.{key} is missing; measure it with `splitc calibrate`" in message


def test_a_collective_that_is_half_measured_is_told() -> None:
    assert "link.all_reduce.latency is missing; measure it with `splitc calibrate`" in refused(
        GOOD + "all_reduce.bandwidth = 1e9\n"
    )


def test_all_problems_are_told_at_once() -> None:
    text = edited("^bandwidth.*$", "bandwith = 1e9") + "\n[extra]\n"
    message = refused(text.replace("launch = 0.0", "launch = -1"))
    assert "link.bandwidth is missing" in message
    assert "link.bandwith is an unknown key; did you mean bandwidth?" in message
    assert "extra is an unknown key" in message
    assert "device.launch is -1; it must be a finite number of at least 0" in message


SENSELESS = [
    ("^memory = .*$", "memory = 0", "device.memory is 0; it must be a finite number of more than 0"),
    ("^memory = .*$", "memory = true", "device.memory is True; it must be a finite number"),
    ("^memory = .*$", "memory = inf", "device.memory is inf; it must be a finite number"),
    ("^memory = .*$", f"memory = 1{'0' * 400}", "it must be a finite number"),
    ("^memory = .*$", 'memory = "16 GB"', "device.memory is '16 GB'; it must be a finite number"),
    ("^efficiency.matmul.*$", "efficiency.matmul = 1.5", "more than 0 and at most 1"),
    ("^efficiency.memory.*$", "efficiency.memory = 1\nefficiency.convs = 1", "did you mean conv?"),
    ("^flop_rate.*$", "flop_rate.float31 = 1e9", "did you mean float32?"),
    ("^flop_rate.*$", "", "device.flop_rate is missing; give flop_rate.float32 in FLOP/s, or measure it with"),
    ("^flop_rate.*$", "flop_rate = 3", "device.flop_rate is 3; it must be a table"),
    ("^duplex.*$", "duplex = 1", "link.duplex is 1; it must be true or false"),
    ("^shared.*$", 'shared = "no"', "link.shared is 'no'; it must be true or false"),
    ("^processor.*$", "processor = -1", "link.processor is -1; it must be a finite number of at least 0"),
    ("^processor.*$", "allreduce.latency = 1", "link.allreduce is an unknown key; did you mean all_reduce?"),
    ("^processor.*$", "all_reduce.latncy = 1", "link.all_reduce.latncy is an unknown key; did you mean latency?"),
    ("^processor.*$", "all_reduce = 1", "link.all_reduce is 1; it must be a table"),
    ("^ranks_share.*$", "world = 0", "world is 0; it must be a whole number of at least 1"),
    ("^ranks_share.*$", "cores = 1.5", "cores is 1.5; it must be a whole number of at least 1"),
    ("^ranks_share.*$", "rank_per_host = 8", "rank_per_host is an unknown key; did you mean ranks_per_host?"),
    ("^name = .*$(?=\nsource)", "", "name is missing; it must be a text"),
    ("^name = .*$(?=\nsource)", 'name = ""', "name is ''; it must be a text"),
    ("^source = .*$", "source = 3", "source is 3; it must be a text"),
    (r"^\[link\]$", "[[link]]", "it must be a table of bandwidth, latency, duplex, shared, processor, "),
]


def test_a_value_that_makes_no_sense_is_refused() -> None:
    for pattern, new, problem in SENSELESS:
        assert problem in refused(edited(pattern, new))


def test_hosts_need_a_link_and_a_number_of_ranks() -> None:
    for text, problem in (
        (HOSTS.replace("ranks_per_host = 8", ""), "local_link and ranks_per_host belong together"),
        (HOSTS.partition("[local_link]")[0], "local_link and ranks_per_host belong together"),
        (HOSTS + "shared = true", "local_link.shared is true; give the bandwidth that a rank has"),
        (HOSTS.replace("bandwidth = 1e9", ""), "local_link.bandwidth is missing"),
        (HOSTS.replace("ranks_per_host = 8", "ranks_per_host = 0"), "ranks_per_host is 0; it must be a whole number"),
    ):
        assert problem in refused(text)


def test_sites_need_a_line_and_a_number_of_ranks() -> None:
    text = HOSTS.replace("ranks_per_host = 8", "ranks_per_host = 8\nranks_per_site = 16")
    text += "\n[site_link]\nbandwidth = 1e5\nlatency = 0.05\nshared = true\n"
    cluster = parse_cluster(text, "mine.toml")
    assert cluster.site_link == Link(1e5, 0.05, shared=True) and cluster.ranks_per_site == 16
    assert parse_cluster(to_toml(cluster), "text") == cluster
    assert digest(cluster) != digest(parse_cluster(HOSTS, "text"))
    for wrong, problem in (
        (text.partition("[site_link]")[0], "site_link and ranks_per_site belong together"),
        (text.replace("ranks_per_site = 16", "ranks_per_site = 12"), "ranks_per_site is 12, which hosts of 8 ranks"),
        (text.replace("latency = 0.05\n", ""), "site_link.latency is missing"),
    ):
        assert problem in refused(wrong)


def test_unlike_ranks_that_make_no_sense_are_refused() -> None:
    text = edited("^ranks_share.*$", "world = 4")
    for tables, problem in (
        ("[unlike]\nranks = [1]", "it must be a list of tables; write [[unlike]] over each"),
        ("[[unlike]]\ndevice.memory = 1e9", "unlike[0].ranks is missing; it must be a list of ranks, as [2, 3]"),
        ("[[unlike]]\nranks = 3", "unlike[0].ranks is 3; it must be a list of ranks"),
        ("[[unlike]]\nranks = []", "unlike[0].ranks is []; it must be a list of ranks"),
        ("[[unlike]]\nranks = [-1]", "unlike[0].ranks is [-1]; it must be a list of ranks"),
        ("[[unlike]]\nranks = [true]", "unlike[0].ranks is [True]; it must be a list of ranks"),
        ("[[unlike]]\nranks = [1, 1]", "unlike names ranks more than once: 1"),
        ("[[unlike]]\nranks = [1, 2]\n[[unlike]]\nranks = [2, 0, 1]", "unlike names ranks more than once: 1, 2"),
        ("[[unlike]]\nranks = [2, 4]", "unlike names rank 4; the cluster has ranks 0 to 3"),
        ("[[unlike]]\nranks = [2]\ndevice = 3", "unlike[0].device is 3; it must be a table of name, flop_rate"),
        ("[[unlike]]\nranks = [2]\nlink.bandwdth = 3", "unlike[0].link.bandwdth is an unknown key; did you mean"),
        (
            "[[unlike]]\nranks = [2]\ndevice.memory = -3",
            "unlike[0].device.memory is -3; it must be a finite number of more",
        ),
        ("[[unlike]]\nranks = [2]\ndevice.efficiency.conv = 1", "unlike[0].device.efficiency.matmul is missing"),
        ("[[unlike]]\nranks = [2]\nmemory = 3", "unlike[0].memory is an unknown key; there are ranks, device, link"),
        ("[[unlike]]\nrank = [2]", "unlike[0].rank is an unknown key; did you mean ranks?"),
    ):
        assert problem in refused(f"{text}\n{tables}\n")


def test_what_is_wrong_for_all_ranks_is_told_once() -> None:
    message = refused(edited("^bandwidth.*$", "") + "\n[[unlike]]\nranks = [1]\ndevice.memory = 1e9\n")
    assert message.count("bandwidth is missing") == 1


def test_a_text_that_is_no_toml_is_refused_with_its_line() -> None:
    with pytest.raises(CostError, match=r"mine\.toml is no TOML file.*line 1"):
        parse_cluster("no equals sign", "mine.toml")


def test_what_varies_and_what_messages_cost_is_written_where_it_was_measured() -> None:
    plain = parse_cluster(GOOD, "mine.toml")
    text = to_toml(plain)
    assert "jitter" not in text and "message_processor" not in text
    link, device = replace(plain.link, message_processor=1e-3), replace(plain.device, jitter=2e-3)
    varied = replace(plain, link=link, device=device)
    assert parse_cluster(to_toml(varied), "mine.toml") == varied and digest(varied) != digest(plain)
