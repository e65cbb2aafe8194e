"""InsertPulls: each layer waits for its own parameters from the servers."""

from __future__ import annotations

from textwrap import dedent

from splitc.ir.graph import info
from splitc.ir.program import LoweredProgram
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.servers.insert_pulls import InsertPulls
from tests.support.pair import placed_pair, printed_stage
from tests.support.printed import program_before


def bucketed(strategy: str, nbytes: int) -> LoweredProgram:
    """The pair on three ranks, its gradients in buckets of at least `nbytes`."""
    return BucketGradients(nbytes).run(program_before(BucketGradients, placed_pair(3, strategy)))


def test_a_pull_stands_just_before_the_first_reader_of_its_bucket() -> None:
    before = bucketed("parameter_server(servers=1, overlap=True)", 140)
    assert printed_stage(InsertPulls().run(before), "worker") == dedent("""\
        input_1 = input                                                       # f32[b, 8]  worker
        target = input                                                        # f32[b, 5]  worker
        pull = pull(role='worker', bucket=1)                                  # worker
        a = self.a(input_1)                                                   # f32[b, 6]  worker
        pull_1 = pull(role='worker', bucket=0)                                # worker
        b = self.b(a)                                                         # f32[b, 5]  worker
        mse_loss = mse_loss(b, target, reduction='mean')                      # f32[]  worker
        mse_loss_scale_by_share = scale_by_share(mse_loss)                    # f32[]  worker
        push = push(role='worker', parameters=('a.weight', 'a.bias', 'b.weight', 'b.bias'))  # worker""")


def test_one_bucket_for_all_layers_is_pulled_before_the_first() -> None:
    lines = printed_stage(InsertPulls().run(bucketed("parameter_server(overlap=True)", 16_000_000)), "worker")
    names = [line.split(" = ")[0] for line in lines.splitlines()]
    assert names[:5] == ["input_1", "target", "pull", "a", "b"] and lines.count("pull(") == 1


def test_nothing_is_inserted_in_the_plain_form_or_without_servers() -> None:
    for strategy in ["parameter_server(overlap=False)", "data_parallel"]:
        before = bucketed(strategy, 140)
        (role,) = before.plan.roles
        assert printed_stage(InsertPulls().run(before), role) == printed_stage(before, role), strategy


def test_a_bucket_that_no_node_reads_is_pulled_at_the_end() -> None:
    before = bucketed("parameter_server(servers=1, overlap=True)", 140)
    (stage,) = (stage for stage in before.stages if stage.served)
    stage.graph.output_node().args = (None,)
    for node in reversed(stage.graph.nodes):
        if node.op != "output" and node.name not in ("input_1", "target", "a"):
            stage.graph.erase_node(node)
    (after,) = (stage for stage in InsertPulls().run(before).stages if stage.served)
    assert [node.name for node in after.graph.nodes][-3:] == ["a", "pull_1", "output"]
    assert all(info(node).source for node in after.graph.nodes if node.op != "output")
