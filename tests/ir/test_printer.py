"""Programs as text, and the graph of one rank."""

from __future__ import annotations

import torch

from splitc.ir.printer import print_program, rank_graph, show_spec
from splitc.ir.program import SizeSpec, Spec, TensorSpec
from splitc.passes.rewriting import lower
from tests.support.pair import placed_pair


def test_the_batch_of_a_spec_is_b() -> None:
    specs: list[tuple[Spec, str]] = [
        (TensorSpec((1, 64, 55), torch.float32, 0), "f32[b, 64, 55]"),
        (TensorSpec((7, 6), torch.bfloat16, 0), "bf16[7*b, 6]"),
        (TensorSpec((7, 6), torch.int64), "i64[7, 6]"),
        (TensorSpec((), torch.bool), "bool[]"),
        (SizeSpec(1), "b"),
        (SizeSpec(3, 2), "3*b + 2"),
        ((SizeSpec(2), None), "(2*b, )"),
        (None, ""),
    ]
    for spec, text in specs:
        assert show_spec(spec) == text


def test_a_lowered_program_ends_with_the_step_of_each_rank_program() -> None:
    text = print_program(lower(placed_pair(2, "hybrid_single")))
    assert [line for line in text.splitlines() if line.startswith("# step")] == [
        "# step of role trunk",
        "# step of roles trunk and head",
    ]
    assert "#   head: recv_grad" not in text and "#   trunk: recv_grad cut0 <- head" in text


def test_the_graph_of_a_rank_has_its_own_shapes_and_peers() -> None:
    program = lower(placed_pair(3, "layer_separation(n_c=2, n_f=1)"))
    trunk, head = ({n.name: n for n in rank_graph(program, rank).graph.nodes} for rank in (0, 2))
    assert "b" not in trunk and "a" not in head, "a rank has the nodes of its own roles"
    assert trunk["a"].meta["shape"] == (4, 6) and head["b"].meta["shape"] == (8, 5)
    assert head["cut0"].meta["comm"] == ((0, 0, 4), (1, 4, 8)), "peers and their examples"
