"""Where this package itself holds a rank up, that is said, and nothing of the user's is blamed."""

from dataclasses import replace

import pytest
from builders import AGREEMENT_WAIT, GLOO, NCCL, OWN_WAIT, SITE, TRAINING_STEP, Backend, job, user
from judged import first
from scenes import rank_zero_evaluates_before_it_presents_its_loaders

from lightning_ncclsafe.facts import Frame, Phase, RankFacts
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.rules.judging import judge

BACKENDS = pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])
INIT = {"phase": Phase.INIT, "batch": -1}


@BACKENDS
def test_a_callback_of_ours_is_named(net: Backend) -> None:
    held = net.working(2, *OWN_WAIT, seq=60, action="[Callback]CollectiveTimer.on_train_batch_end")
    finding = first(job(*(held if rank == 2 else net.waiting(rank, seq=61) for rank in range(4))))
    assert (finding.rule, finding.ranks, finding.confidence) == ("own-code", (2,), Confidence.CERTAIN)
    assert finding.location.endswith(f" in {Preflight.wait.__name__}")
    assert "in CollectiveTimer.on_train_batch_end, batch 11" in finding.summary


@BACKENDS
def test_own_code_before_the_first_batch_comes_before_late_at_init(net: Backend) -> None:
    held = net.working(0, *OWN_WAIT, seq=1, action="preflight", **INIT)
    found = judge(job(held, *(net.in_barrier(rank, "post_setup", seq=2, **INIT) for rank in (1, 2, 3)))).findings
    assert [finding.rule for finding in found] == ["own-code", "late-at-init"]


def given_up(facts: RankFacts) -> RankFacts:
    return replace(facts, progress=replace(facts.progress, last_action="agreement:train_dataloader"))


@BACKENDS
def test_a_rank_that_all_others_have_left_in_a_comparison_is_named_and_not_they(net: Backend) -> None:
    alone = net.rank(1, *AGREEMENT_WAIT, seq=6, action="agreement:train_dataloader", **INIT)  # type: ignore[arg-type]
    others = (given_up(net.in_barrier(rank, "run-stage", seq=7, **INIT)) for rank in (0, 2, 3))
    found = judge(job(*others, alone)).findings
    assert found[0].rule == "own-code"
    assert found[0].ranks == (1,)
    assert "unpresented-loader" not in {finding.rule for finding in found}


@BACKENDS
@pytest.mark.parametrize(
    "inner",
    [user("__len__", 12), Frame(file=f"{SITE}/numpy/core.py", line=1, function="load")],
    ids=["user", "library"],
)
def test_code_of_others_that_ours_has_called_is_not_ours(net: Backend, inner: Frame) -> None:
    held = net.working(2, OWN_WAIT[0], inner, seq=60, action=TRAINING_STEP)
    found = judge(job(*(held if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))).findings
    assert "own-code" not in {finding.rule for finding in found}


@BACKENDS
def test_own_code_that_nobody_waits_for_is_no_hang(net: Backend) -> None:
    assert judge(job(*(net.working(rank, *OWN_WAIT, seq=60) for rank in range(4)))).findings == ()


@BACKENDS
def test_ranks_that_wait_for_another_one_in_a_comparison_are_innocent(net: Backend) -> None:
    """They stand in code of ours, where they wait for rank 0, which works alone."""
    found = {
        finding.rule: finding for finding in judge(rank_zero_evaluates_before_it_presents_its_loaders(net)).findings
    }
    assert (found["rank-zero-only-work"].ranks, "own-code" in found) == ((0,), False)
