"""Clusters: what ships, what a file must say, and what is said when it does not."""

import re
from dataclasses import replace

import pytest

from cost_models.devices import known_clusters, load_cluster
from splitc.cluster_file import parse_cluster, to_toml
from splitc.errors import CostError
from tests.small_programs import small_cluster

GOOD = to_toml(small_cluster())


def edited(pattern: str, new: str) -> str:
    text, count = re.subn(pattern, new, GOOD, flags=re.MULTILINE)
    assert count == 1
    return text


@pytest.mark.parametrize("name", known_clusters())
def test_every_cluster_that_ships_can_be_loaded_and_tells_its_source(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert "assumption" in cluster.source


def test_the_clusters_of_the_papers_ship():
    assert set(known_clusters()) >= {
        "v100-10gbe", "v100-25gbe", "v100-40gbe", "v100-100gbe", "k80-2.6gbe", "a100-100gbe",
        "h100-400gbe",
    }  # fmt: skip


def test_the_v100_of_stanza_has_the_numbers_of_its_data_sheet():
    cluster = load_cluster("v100-10gbe")
    assert cluster.device.flop_rate["float32"] == 15.7e12
    assert cluster.device.memory_bandwidth == 900e9
    assert cluster.link.bandwidth == 10e9 / 8


@pytest.mark.parametrize("gbit", [10, 25, 40, 100])
def test_the_v100_clusters_differ_in_their_link_only(gbit):
    cluster = load_cluster(f"v100-{gbit}gbe")
    assert cluster.link.bandwidth == gbit * 1e9 / 8
    assert cluster.device == load_cluster("v100-10gbe").device


@pytest.mark.parametrize("name", known_clusters())
def test_a_cluster_written_as_toml_reads_back_equal(name):
    cluster = load_cluster(name)
    assert parse_cluster(to_toml(cluster), "text") == cluster


def test_signs_of_all_kinds_in_a_name_survive_the_file():
    cluster = replace(small_cluster(), name='a "quoted" \\ ü\x7f\nname', world=3)
    assert parse_cluster(to_toml(cluster), "text") == cluster


def test_a_path_is_read_as_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_cluster(path) == load_cluster(str(path)) == small_cluster()


def test_a_cluster_made_by_hand_is_checked_like_a_file():
    assert load_cluster(small_cluster()) == small_cluster()
    with pytest.raises(CostError, match=r"link\.bandwidth is -1\.0"):
        load_cluster(small_cluster(bandwidth=-1.0))
    with pytest.raises(CostError, match=r"device\.memory is nan"):
        load_cluster(small_cluster(memory=float("nan")))


def test_an_unknown_name_is_answered_with_a_near_one_and_all_others():
    with pytest.raises(CostError, match="did you mean v100-10gbe") as error:
        load_cluster("v100-10gb")
    assert "h100-400gbe" in str(error.value)
    assert "splitc calibrate" in str(error.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(CostError, match=r"cannot read the cluster file nowhere\.toml"):
        load_cluster("nowhere.toml")


def test_a_missing_number_names_file_key_and_what_to_do():
    with pytest.raises(CostError, match=r"mine\.toml") as error:
        parse_cluster(edited("^latency.*$", ""), "mine.toml")
    assert "link.latency is missing; measure it with `splitc calibrate`" in str(error.value)


def test_all_problems_are_told_at_once():
    text = edited("^bandwidth.*$", "bandwith = 1e9") + "\n[extra]\n"
    with pytest.raises(CostError) as error:
        parse_cluster(text.replace("launch = 0.0", "launch = -1"), "mine.toml")
    message = str(error.value)
    assert "link.bandwidth is missing" in message
    assert "link.bandwith is an unknown key; did you mean bandwidth?" in message
    assert "extra is an unknown key" in message
    assert "device.launch is -1; it must be at least 0" in message


@pytest.mark.parametrize(
    ("pattern", "new", "problem"),
    [
        ("^memory = .*$", "memory = 0", "device.memory is 0; it must be more than 0"),
        ("^memory = .*$", "memory = true", "device.memory is True; it must be a finite number"),
        ("^memory = .*$", "memory = inf", "device.memory is inf; it must be a finite number"),
        ("^efficiency.matmul.*$", "efficiency.matmul = 1.5", "more than 0 and at most 1"),
        ("^efficiency.matmul.*$", "", "device.efficiency.matmul is missing"),
        ("^flop_rate.*$", "flop_rate.float31 = 1e9", "did you mean float32?"),
        ("^flop_rate.*$", "", "device.flop_rate has no number"),
        ("^flop_rate.*$", "flop_rate = 3", "device.flop_rate is 3; it must be a table"),
        ("^duplex.*$", "duplex = 1", "link.duplex is 1; it must be true or false"),
        ("^ranks_share.*$", "world = 0", "world is 0; it must be a whole number of at least 1"),
        ("^name = .*$(?=\nsource)", "", "name is missing; it must be a text"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(pattern, new, problem):
    with pytest.raises(CostError) as error:
        parse_cluster(edited(pattern, new), "mine.toml")
    assert problem in str(error.value)


def test_a_text_that_is_no_toml_is_refused_with_its_line():
    with pytest.raises(CostError, match=r"mine\.toml is no TOML file.*line 1"):
        parse_cluster("no equals sign", "mine.toml")


def test_ranks_that_share_a_device_get_equal_parts_of_it():
    cluster = small_cluster(ranks_share_device=True)
    part = cluster.device_for(4)
    assert part.flop_rate == {"float32": 0.25e6}
    assert part.memory_bandwidth == 0.25e6
    assert part.memory == 0.25e9
    assert cluster.device_for(1) == cluster.device


def test_ranks_with_devices_of_their_own_have_all_of_them():
    assert small_cluster().device_for(4) == small_cluster().device
