"""SplitBrain's table 1 and memory saving, its ratio and its rule, against the captured VGG variant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.conv_fc_split import ConvFcSplit, conv_fc_split
from benchmarks.papers.splitbrain import Layer, ccr, divided_weights, held, memory_saving, operations, partition
from splitc.errors import CostError
from splitc.ir.linears import linear_layers
from splitc.ir.placements import Placement
from splitc.report.figures import Figures
from tests.support.compiled import compiled
from tests.support.paper_models import SplitBrainVGG, splitbrain_vgg

TABLE_1 = [1728, 36864, 73728, 147456, 294912, 589824, 589824, 4194304, 1048576, 10240]


def variant() -> ConvFcSplit:
    return conv_fc_split(splitbrain_vgg())


def net() -> list[Layer]:
    """The captured variant as listing 1 sees it: its layers, a ReLU after each but the last, and the softmax."""
    program = splitbrain_vgg()
    found: list[Layer] = []
    for layer in program.layers:
        if layer.name in linear_layers(program):
            outputs, inputs = program.tensors[f"{layer.name}.weight"].shape
            found.append(Layer(layer.name, "linear", inputs, outputs))
        else:
            found.append(Layer(layer.name, "conv"))
        found.append(Layer(f"relu {layer.name}", "elementwise"))
    return [*found[:-1], Layer("softmax", "log_softmax")]


def chain(*sizes: int) -> list[Layer]:
    """Linear layers of these widths with a ReLU between them, and the softmax."""
    layers: list[Layer] = []
    for k in range(len(sizes) - 1):
        layers += [Layer(f"fc{k}", "linear", sizes[k], sizes[k + 1]), Layer(f"relu{k}", "elementwise")]
    return [*layers[:-1], Layer("softmax", "log_softmax")]


def shape(transformed: list[Layer]) -> list[str]:
    """What matters of a transformed net: where it communicates and which layers are divided."""
    kept = [layer for layer in transformed if layer.kind not in ("conv", "elementwise")]
    return [f"{layer.name} / {layer.parts}" if layer.parts > 1 else layer.name for layer in kept]


# -- table 1 and figure 7c ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_parameters_of_each_layer_are_those_of_table_1() -> None:
    assert [variant().parameters([layer.name]) for layer in splitbrain_vgg().layers] == TABLE_1


@pytest.mark.slow
def test_groups_of_eight_save_about_two_thirds_of_the_parameters_memory() -> None:
    """The abstract says up to 67 %."""
    assert memory_saving(variant().P, variant().P - variant().P_c, 8) == pytest.approx(0.66, abs=0.005)
    assert memory_saving(variant().P, variant().P - variant().P_c, 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mp", [2, 4])
def test_a_rank_of_a_compiled_program_holds_what_the_formula_says(mp: int) -> None:
    given = (torch.randn(2, 3, 32, 32),), torch.randint(10, (2,))
    pins = {"fc0": Placement(holding="sharded", group=mp), "fc1": Placement(holding="sharded", group=mp)}
    program = compiled(
        SplitBrainVGG(), *given, F.cross_entropy, 4, f"modulo_shard(mp={mp})", analysed=splitbrain_vgg(), pins=pins
    ).program
    divided = [name for name, place in program.plan.placements.items() if place.holding == "sharded"]
    assert {"fc0", "fc1"} <= set(divided)
    expected = 4 * held(variant().P, variant().parameters(divided), mp)
    fullest = max(Figures(program).rank(rank)["parameter_bytes"] for rank in range(4))
    uneven = 4 * 1024 if "fc2" in divided else 0  # a row more where the groups do not divide its 10 outputs
    assert expected <= fullest <= expected + uneven


# -- the ratio of computation to communication -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_operations_of_the_ratio_are_those_that_are_counted() -> None:
    costs = splitbrain_vgg().costs
    for layer in net():
        if layer.kind == "linear":
            assert operations(layer) == costs[layer.name].at(1).flops


@pytest.mark.slow
def test_the_ratio_falls_from_the_first_fc_layer_to_the_last() -> None:
    ratios = [ccr(layer) for layer in net() if layer.kind == "linear"]
    assert ratios == [
        pytest.approx(3 * 4096 * 1024 / 5120),
        pytest.approx(3 * 1024 * 1024 / 2048),
        pytest.approx(3 * 1024 * 10 / 1034),
    ]
    assert ratios[0] > ratios[1] > 40 * ratios[2]


# -- listing 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_a_low_threshold_all_fc_layers_of_the_variant_are_divided() -> None:
    transformed = partition(net(), 8, threshold=1)
    assert shape(transformed) == [
        "modulo fc0", "fc0 / 8", "shard fc1", "fc1 / 8", "shard fc2", "fc2 / 8", "shard softmax", "softmax"
    ]  # fmt: skip
    assert divided_weights(transformed) == variant().P - variant().P_c


def test_a_higher_threshold_leaves_small_layers_whole() -> None:
    transformed = partition(net(), 8, threshold=100)
    assert shape(transformed) == ["modulo fc0", "fc0 / 8", "shard fc1", "fc1 / 8", "shard fc2", "fc2", "softmax"]
    assert memory_saving(variant().P, divided_weights(transformed), 8) == pytest.approx(0.66, abs=0.005)
    assert shape(partition(net(), 8, threshold=2000)) == ["modulo fc0", "fc0 / 8", "shard fc1", "fc1", "fc2", "softmax"]
    assert partition(net(), 8, threshold=3000) == net()


def test_an_undivided_layer_between_divided_ones_gets_no_second_modulo_layer() -> None:
    transformed = partition(chain(1024, 1024, 4, 1024, 1024), 4, threshold=400)
    assert shape(transformed) == [
        "modulo fc0", "fc0 / 4", "shard fc1", "fc1", "fc2", "fc3 / 4", "shard softmax", "softmax"
    ]  # fmt: skip
    assert transformed[2].kind == "elementwise", "a ReLU takes the part that a worker has"


def test_a_shard_layer_gathers_the_features_of_the_layer_below() -> None:
    transformed = partition(chain(512, 256, 128), 4, threshold=1)
    features = {layer.name: (layer.inputs, layer.outputs) for layer in transformed if layer.kind in ("modulo", "shard")}
    assert features == {"modulo fc0": (512, 512), "shard fc1": (256, 256), "shard softmax": (128, 128)}


def test_a_convolution_above_a_divided_layer_is_refused() -> None:
    with pytest.raises(CostError, match="layer up needs all 64 features, which are sharded over 4 workers"):
        partition([Layer("fc", "linear", 64, 64), Layer("up", "conv")], 4, threshold=1)
    above = [Layer("fc", "linear", 64, 64), Layer("last", "linear", 64, 1), Layer("up", "conv")]
    assert shape(partition(above, 4, threshold=10)) == ["modulo fc", "fc / 4", "shard last", "last"]


def test_a_kind_of_layer_that_the_rule_does_not_know_is_refused() -> None:
    with pytest.raises(CostError, match="layer norm is of an unknown kind, 'norm'"):
        Layer("norm", "norm")
