"""Action lists print as text and parse back."""

from __future__ import annotations

import pytest

from splitc.errors import InternalError
from splitc.ir.schedule.actions import Action, print_actions
from tests.support.actions import parse_actions

LINES = """\
conv: send target -> fc
conv: forward
fc: modulo cut0 [1]
fc: forward [1]
fc: modulo_grad cut0 [1]
conv: recv_grad cut0 <- fc
conv: all_reduce bucket0
worker: push bucket12 [3]
conv: all_reduce_tied bucket0
conv: all_reduce_tied embed.my layer.weight
sum_loss
"""


def test_actions_print_as_they_were_written() -> None:
    assert print_actions(parse_actions(LINES)) == LINES


def test_a_bucket_is_a_number_and_a_parameter_of_that_name_is_none() -> None:
    bucket, tied = parse_actions("conv: all_reduce bucket0\nconv: all_reduce_tied bucket0\n")
    assert bucket == Action("all_reduce", role="conv", bucket=0)
    assert tied == Action("all_reduce_tied", "bucket0", role="conv")


def test_a_line_that_is_no_action_is_named() -> None:
    for line in ["conv -> fc", "", "conv: sned cut0 -> fc", "conv: forward [one]"]:
        if not line:
            assert parse_actions(line) == ()
            return
        with pytest.raises(InternalError, match=r"line 1|unknown action|bucket"):
            parse_actions(line)


def test_only_an_all_reduce_and_a_push_have_a_bucket() -> None:
    for verb, bucket in [("forward", 0), ("push", None), ("all_reduce", None)]:
        with pytest.raises(InternalError, match="bucket"):
            Action(verb, bucket=bucket)
