"""SplitRanks: one graph for each role, entered by `recv` and left by `send`."""

from __future__ import annotations

from textwrap import dedent

from splitc.passes.split_ranks import SplitRanks
from tests.support.pair import placed_pair, printed_stage
from tests.support.printed import printed, program_after, program_before


def test_each_role_gets_its_own_nodes_and_receives_without_the_sender() -> None:
    program = placed_pair(3, "layer_separation(n_c=2, n_f=1)")
    after = program_after(SplitRanks, program)
    assert printed_stage(after, "trunk") == dedent("""\
        input_1 = input                                                       # f32[b, 8]  trunk
        target = input                                                        # f32[b, 5]  trunk
        sent_target = send(target, cut='target', role='head')                 # f32[b, 5]  trunk
        a = self.a(input_1)                                                   # f32[b, 6]  trunk
        sent_cut0 = send(a, cut='cut0', role='head')                          # f32[b, 6]  trunk
        all_reduce = all_reduce(role='trunk', parameters=('a.weight', 'a.bias'))  # trunk""")
    assert printed_stage(after, "head") == dedent("""\
        target_head = recv(None, cut='target', role='trunk', shape=(-1, 5), dtype=float32)  # f32[b, 5]  head
        cut0 = recv(None, cut='cut0', role='trunk', shape=(-1, 6), dtype=float32)  # f32[b, 6]  head
        b = self.b(cut0)                                                      # f32[b, 5]  head
        mse_loss = mse_loss(b, target_head, reduction='mean')                 # f32[]  head""")


def test_a_stage_knows_its_layers_inputs_cuts_and_tensors() -> None:
    after = program_after(SplitRanks, placed_pair(3, "layer_separation(n_c=2, n_f=1)"))
    trunk, head = after.stages
    assert (trunk.layers, trunk.inputs, trunk.tensors) == (("a",), ("input", "target"), ("a.weight", "a.bias"))
    assert (head.layers, head.inputs, head.tensors) == (("b",), (), ("b.weight", "b.bias"))
    assert [cut.name for cut in trunk.sends] == [cut.name for cut in head.receives] == ["target", "cut0"]
    assert (trunk.has_loss, head.has_loss) == (False, True)


def test_ranks_in_the_same_roles_share_a_rank_program() -> None:
    after = program_after(SplitRanks, placed_pair(3, "hybrid_single"))
    assert [(each.roles, each.ranks) for each in after.rank_programs] == [
        (("trunk",), (1, 2)),
        (("trunk", "head"), (0,)),
    ]


def test_the_graph_of_all_roles_is_left_as_it_was() -> None:
    before = program_before(SplitRanks, placed_pair(2, "layer_separation"))
    text = printed(before)
    after = SplitRanks().run(before)
    assert printed(before) == printed(after) == text
