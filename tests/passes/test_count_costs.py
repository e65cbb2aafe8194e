"""CountCosts: what each layer computes, moves and keeps at any batch."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

from splitc.ir.program import Program
from splitc.passes.count_costs import CountCosts
from tests.support.pair import analysed_pair
from tests.support.printed import printed


def table(program: Program, batch: int) -> str:
    """Print the ops of each layer: FLOPs, bytes accessed, launches."""
    return "\n".join(
        f"{layer:<3}{'backward' if op.backward else 'forward':<10}{op.name:<16}"
        f"{op.flops:5.0f} {op.bytes_accessed:5.0f} {op.kernel_launches:.0f}"
        for layer, line in program.costs.items()
        for op in line.at(batch).ops
        if op.flops
    )


def test_a_linear_layer_counts_two_flops_a_multiply_add() -> None:
    before = replace(analysed_pair(), costs={})
    assert [layer.name for layer in before.layers] == ["a", "b"]
    assert table(CountCosts().run(before), 4) == dedent("""\
        a  forward   addmm             384   440 1
        a  backward  mm                384   416 1
        b  forward   addmm             240   316 1
        b  backward  mm                480   592 2""")


def test_the_graph_stays_and_the_program_given_gets_no_costs() -> None:
    before = replace(analysed_pair(), costs={})
    after = CountCosts().run(before)
    assert printed(after) == printed(before)
    assert after.costs.keys() == {"a", "b"} and not before.costs
