"""The page that explains a hang, from what ranks say that they do."""

from __future__ import annotations

from dataclasses import replace

from splitc.runtime.hangs.page import page
from splitc.runtime.hangs.state import State

RECV = State(
    40, 0, "step", "irecv (8, 64) float32 from rank 2, tag 4", (2, 0), 61.0, 60.0, "fc.py, line 83: cut0 = recv()", ()
)
SUM = replace(RECV, what="all_reduce (9,) float32 over ranks (0, 1, 2)", ends=(0, 1, 2), line="fc.py, line 90: sum()")
READING = State(
    40, 0, "", "", (), 61.4, 60.0, "", ("data.py, line 14, in read: wait()", "train.py, line 3, in main: for")
)


def explained(states: dict[int, State], asker: int = 0) -> str:
    return page(states, asker, lambda rank: f"rank {rank}: it is stopped (SIGSTOP)")


def test_a_rank_in_the_users_code_is_named_with_its_line_and_those_that_wait_stand_together() -> None:
    assert explained({0: SUM, 1: SUM, 2: READING}).splitlines() == [
        "training hangs: rank 2 has been in your code, after step 40, for 61 s (data.py, line 14, in read); ranks "
        "0 and 1 wait for it",
        "  ranks 0 and 1, in step 41: waits in all_reduce (9,) float32 over ranks (0, 1, 2), for 61 s",
        "    fc.py, line 90: sum()",
        "  rank 2, after step 40: waits for no other rank, for 61 s",
        "    data.py, line 14, in read: wait()",
        "    train.py, line 3, in main: for",
    ]


def test_the_cause_is_found_through_ranks_that_wait_themselves_and_a_rank_that_nobody_waits_for_is_none() -> None:
    of_3 = replace(RECV, ends=(3, 2), what="irecv (1,) float32 from rank 3, tag 0")
    states = {0: RECV, 1: READING, 2: of_3, 3: replace(READING, own=("other.py, line 9, in f: g()",))}
    first = explained(states).partition("\n")[0]
    assert "rank 3 has been in your code, after step 40, for 61 s (other.py, line 9, in f)" in first
    assert "rank 1" not in first


def test_a_rank_that_does_not_answer_is_named_before_one_that_is_busy() -> None:
    first, second = explained({0: SUM, 1: READING}).splitlines()[:2]
    assert first == "training hangs: no word from rank 2: it is stopped (SIGSTOP)"
    assert second.startswith("  and rank 1 has been in your code")


def test_of_ranks_that_all_wait_the_one_that_is_elsewhere_is_named_or_of_two_the_one_behind() -> None:
    saving = replace(SUM, doing="save", steps=39, what="barrier", seconds=190.0)
    first = explained({0: SUM, 1: saving, 2: SUM}, 1).partition("\n")[0]
    assert first == (
        "training hangs: rank 1 is in worker.save after step 39, after 0 evaluations (fc.py, line 90); ranks 0 and 2 "
        "are in step 41, after 0 evaluations"
    )
    behind = replace(RECV, steps=39, ends=(0, 2))
    assert "rank 2 is in step 40, after 0 evaluations (" in explained({0: RECV, 2: behind}).partition("\n")[0]
    more = {0: RECV, 1: replace(RECV, ends=(1, 2)), 2: replace(RECV, ends=(0, 2), evaluated=1)}
    assert explained(more).partition("\n")[0] == (
        "training hangs: rank 2 is in step 41, after 1 evaluations (fc.py, line 83); ranks 0 and 1 are in step 41, "
        "after 0 evaluations"
    )
    crossed = explained({0: RECV, 2: replace(RECV, ends=(0, 2))}).partition("\n")[0]
    assert crossed == "training hangs: ranks 0 and 2 wait for each other in step 41, in different operations"


def test_ranks_may_wait_longer_while_one_saves_and_as_long_as_the_most_patient_of_them() -> None:
    saving = replace(READING, doing="save")
    assert explained({0: SUM, 1: SUM, 2: saving}) == ""
    loading = {0: SUM, 1: replace(SUM, steps=1), 2: replace(saving, steps=1)}
    assert "rank 2 has been in worker.save after step 1" in explained(loading), "the first steps may take longer anyway"
    late = {0: replace(SUM, seconds=181.0), 1: SUM, 2: replace(saving, seconds=181.0)}
    assert "rank 2 has been in worker.save after step 40, for 181 s" in explained(late)
    assert explained({0: SUM, 1: SUM, 2: replace(READING, allowed=62.0)}) == ""
    assert explained({0: replace(SUM, seconds=59.0), 1: SUM, 2: READING}) == ""
