"""What the counters of Trainers, and the groups that ranks wait in, say of ranks seen from outside."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_inspection import BARRIER, SITE, look, rank, user

from lightning_ncclsafe.facts import Group, LoopEnd, Phase, Progress, TrainerFacts
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.inspecting.diagnosing import diagnosis_of, wait_in_vain
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.rank_objects import RankObjects, TrainerCounters

RUN = SeenFrame(f"{SITE}/lightning/pytorch/trainer/trainer.py", 1, "_run")
LOOP = SeenFrame(f"{SITE}/lightning/pytorch/loops/training_epoch_loop.py", 9, "advance")
END = SeenFrame(f"{SITE}/lightning/pytorch/loops/fit_loop.py", 9, "on_advance_end")
BACKWARD = SeenFrame(f"{SITE}/torch/autograd/graph.py", 9, "_engine_run_backward")
BROADCAST = SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 9, "broadcast")


def in_batch(epoch: int, batch: int, *, batches: int | None = None, is_last: bool = False) -> RankObjects:
    trainer = TrainerFacts(settings={"max_epochs": "3"}, end=LoopEnd.DATA, batches=batches)
    counters = TrainerCounters(
        epoch=epoch, global_step=9, batch_idx=(batch, -1), is_last=(is_last, False), trainer=trainer
    )
    return RankObjects(counters=counters)


def waits(number: int, *frames: SeenFrame, of: int = 2, **more: object) -> SeenRank:
    looks = (look(at_s, user(10), RUN, *frames) for at_s in (0.0, 3.0, 6.0))
    return replace(rank(number, *looks, of=of), **more)  # type: ignore[arg-type]


def test_a_rank_in_the_next_batch_skipped_the_backward_pass() -> None:
    ranks = [
        waits(0, LOOP, BACKWARD, of=3, objects=in_batch(0, 3)),
        waits(1, LOOP, BROADCAST, of=3, objects=in_batch(0, 4)),
        waits(2, LOOP, BACKWARD, of=3, objects=in_batch(0, 3)),
    ]
    first = diagnosis_of(job_facts(ranks)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("skipped-step", (1,), Confidence.POSSIBLE)
    assert "to batch 4 of epoch 0 without exchanging gradients in batch 3" in first.summary
    # Gradients that accumulate are exchanged with the last batch.
    last = [replace(one, objects=in_batch(0, 3, is_last=True)) if one.process.rank != 1 else one for one in ranks]
    assert all(finding.rule != "skipped-step" for finding in diagnosis_of(job_facts(last)).findings)


@pytest.mark.parametrize(("batches", "rule"), [(6, "stopped-early"), (None, "uneven-batches"), (4, "uneven-batches")])
def test_a_rank_in_the_next_epoch_left_early_or_ran_out_of_batches(batches: int | None, rule: str) -> None:
    ranks = [
        waits(0, LOOP, BACKWARD, objects=in_batch(0, 3, batches=batches)),
        waits(1, LOOP, BROADCAST, objects=in_batch(1, 0, batches=batches)),
    ]
    first = diagnosis_of(job_facts(ranks)).findings[0]
    assert (first.rule, first.ranks) == (rule, (1,))


def test_known_batch_counts_make_uneven_batches_certain() -> None:
    for batch, confidence in ((307, Confidence.CERTAIN), (200, Confidence.POSSIBLE)):
        ranks = [
            waits(0, LOOP, BROADCAST, objects=in_batch(0, batch, batches=396)),
            waits(1, END, BARRIER, objects=in_batch(0, 306, batches=307, is_last=True)),
        ]
        first = diagnosis_of(job_facts(ranks)).findings[0]
        # Who is in a batch that the other has as well is not kept by the number of these.
        assert (first.rule, first.ranks, first.confidence) == ("uneven-batches", (1,), confidence)
        assert any("its loader has 396 batches" in one.text for one in first.evidence)


def test_equal_known_lengths_are_not_suggested_as_a_cause() -> None:
    for batches, is_asked in ((None, True), (6, False)):
        ranks = [
            waits(0, LOOP, user(20), BARRIER, of=3, objects=in_batch(0, 3, batches=batches)),
            waits(1, LOOP, BROADCAST, of=3, objects=in_batch(0, 4, batches=batches)),
            waits(2, LOOP, user(20), BARRIER, of=3, objects=in_batch(0, 3, batches=batches)),
        ]
        first = diagnosis_of(job_facts(ranks)).findings[0]
        assert (first.rule, first.ranks) == ("diverged-collectives", (1,))
        assert ("compare the loaders' lengths" in first.summary) is is_asked


def test_a_rank_further_down_a_function_has_skipped_the_call() -> None:
    def step(line: int, *frames: SeenFrame) -> tuple[SeenFrame, ...]:
        return (LOOP, user(line, "training_step"), *frames, BARRIER)

    most = [waits(number, *step(20, user(8, "contrast")), of=3) for number in range(2)]
    for line, told in ((24, "8 in contrast"), (16, "16 in training_step")):
        first = diagnosis_of(job_facts([*most, waits(2, *step(line), of=3)])).findings[0]
        assert (first.ranks, first.location.rpartition(":")[2]) == ((2,), told)


def test_ranks_at_the_end_of_their_epoch_ran_out_of_data() -> None:
    for others, confidence in ((2, Confidence.LIKELY), (1, Confidence.POSSIBLE)):
        ranks = [waits(number, LOOP, BROADCAST, of=others + 1, objects=in_batch(0, 4)) for number in range(others)]
        ranks.append(waits(others, END, BARRIER, of=others + 1, objects=in_batch(0, 3, is_last=True)))
        first = diagnosis_of(job_facts(ranks)).findings[0]
        # Of two ranks, one has too few batches or the other too many.
        assert (first.rule, first.ranks, first.confidence) == ("uneven-batches", (others,), confidence)


def test_known_and_unknown_counts_are_not_compared() -> None:
    ranks = [waits(0, LOOP, BROADCAST, objects=in_batch(7, 4)), waits(1, END, BARRIER)]
    assert [facts.progress.epoch for facts in job_facts(ranks).ranks] == [-1, -1]
    assert all(facts.trainer is None for facts in job_facts(ranks).ranks)


def test_counts_are_ignored_for_a_rank_outside_the_trainer() -> None:
    before = Progress(phase=Phase.FINISHED, epoch=-1)
    counters = in_batch(3, 2).counters
    assert counters is not None and counters.within(before) == before


def test_ranks_in_each_others_groups_form_a_circle() -> None:
    one, other = (Group(name=name, ranks=(0, 1)) for name in ("1", "2"))
    ranks = [waits(0, BARRIER, objects=RankObjects(group=one)), waits(1, BARRIER, objects=RankObjects(group=other))]
    job = job_facts(ranks)
    first = diagnosis_of(job).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("crossed-groups", (0, 1), Confidence.LIKELY)
    assert "barrier of group '1' (ranks 0-1) for rank 1" in first.summary
    assert wait_in_vain(job)
    same = job_facts(
        [waits(0, BARRIER, objects=RankObjects(group=one)), waits(1, BARRIER, objects=RankObjects(group=one))]
    )
    assert all(finding.rule != "crossed-groups" for finding in diagnosis_of(same).findings)
    assert not wait_in_vain(same)


def test_the_majority_decides_which_group_is_out_of_order() -> None:
    one, other = (Group(name=name, ranks=(0, 1, 2)) for name in ("1", "2"))
    ranks = [
        waits(number, BARRIER, of=3, objects=RankObjects(group=other if number == 2 else one)) for number in range(3)
    ]
    assert diagnosis_of(job_facts(ranks)).findings[0].ranks == (2,)


def test_disjoint_groups_form_no_circle() -> None:
    groups = [Group(name="1", ranks=(0, 1)), Group(name="1", ranks=(0, 1)), Group(name="2", ranks=(2, 3))]
    ranks = [waits(number, BARRIER, of=3, objects=RankObjects(group=group)) for number, group in enumerate(groups)]
    assert all(finding.rule != "crossed-groups" for finding in diagnosis_of(job_facts(ranks)).findings)


def test_ranks_waiting_at_one_place_may_all_have_joined() -> None:
    ranks = [waits(number, LOOP, BACKWARD, objects=in_batch(0, 3)) for number in (0, 1)]
    first = diagnosis_of(job_facts(ranks)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("all-joined", (0, 1), Confidence.POSSIBLE)
    send = SeenFrame(BROADCAST.file, 7, "send")
    for other in (
        [ranks[0], waits(1, LOOP, BACKWARD, objects=in_batch(0, 4))],
        [waits(number, LOOP, send, objects=in_batch(0, 3)) for number in (0, 1)],
        [replace(one, process=replace(one.process, world_size=3)) for one in ranks],
    ):
        assert all(finding.rule != "all-joined" for finding in diagnosis_of(job_facts(other)).findings)


def test_an_unresponsive_name_server_is_found() -> None:
    asks = SeenFrame("/usr/lib/python3.12/socket.py", 962, "getaddrinfo")
    ranks = [waits(0, LOOP, BACKWARD), waits(1, LOOP, asks, name_servers=("10.0.0.2",))]
    first = diagnosis_of(job_facts(ranks)).findings[0]
    assert (first.rule, first.ranks) == ("slow-name-server", (1,)) and "10.0.0.2" in first.summary


LOOPS = """\
def epoch(loader):
    for batch in loader:
        backward(batch)


def main(epochs):
    for number in range(epochs):
        epoch(loader)
        reduce(number)
        for name in names:
            reduce(name)
"""


@pytest.mark.parametrize(
    ("lines", "rule", "location"),
    [
        # In an evaluation behind the loop that the others train in; line numbers of main, of epoch.
        ((9, None), "uneven-batches", ":2 in epoch"),
        # One that is still in it, and has a collective in its loader.
        ((8, 2), "diverged-collectives", ""),
        # One that is before it may be in another epoch.
        ((7, None), "diverged-collectives", ""),
    ],
)
def test_a_rank_that_left_the_training_loop_had_fewer_batches(
    tmp_path: Path, lines: tuple[int, int | None], rule: str, location: str
) -> None:
    source = tmp_path / "train.py"
    source.write_text(LOOPS)

    def waits_at(number: int, main: int, epoch: int | None, *frames: SeenFrame) -> SeenRank:
        inner = [SeenFrame(str(source), epoch, "epoch")] if epoch else []
        looks = [look(at_s, SeenFrame(str(source), main, "main"), *inner, *frames) for at_s in (0.0, 3.0, 6.0)]
        return rank(number, *looks, of=3)

    ranks = [waits_at(number, 8, 3, BACKWARD) for number in range(2)]
    first = diagnosis_of(job_facts([*ranks, waits_at(2, *lines, BROADCAST)])).findings[0]
    assert (first.rule, first.ranks, first.confidence) == (rule, (2,), Confidence.POSSIBLE)
    assert first.location.endswith(location)
    assert ("`for batch in loader:` (line 2)" in first.summary) is bool(location)
