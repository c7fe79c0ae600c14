"""What is said of a rank that is late at the start: its line, its memory, how fast that grows, and what is left."""

from dataclasses import replace

import pytest
import scenes
from builders import BARRIER, FETCH, GLOO, INIT_GROUP, MAIN, RUN, job, process, user

from lightning_ncclsafe.facts import (
    Action,
    ChildProcess,
    ExceptionFacts,
    Frame,
    HostFacts,
    JobFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Finding, Plan
from lightning_ncclsafe.facts.wording import location_of
from lightning_ncclsafe.rules.hang.late_at_init import memory_words, used_up_words
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.machine import growth_bytes_per_s

MB, GB = 1_000_000, 1_000_000_000
AVAILABLE = HostFacts(memory_available_bytes=2_100 * MB)


def late(memory: HostFacts) -> Finding:
    """Rank 0 in DataModule.setup, with this memory."""
    late_in_setup = scenes.late_in_setup(GLOO)
    culprit, *others = late_in_setup.ranks
    return judge(replace(late_in_setup, ranks=(replace(culprit, host_facts=memory), *others))).findings[0]


def waiting(
    rank: int, *, local_rank: int | None = None, host: str = "node-1", memory: HostFacts = AVAILABLE
) -> RankFacts:
    progress = Progress(phase=Phase.INIT, actions=(Action(name="init_process_group", for_s=30),), idle_s=30)
    local = rank if local_rank is None else local_rank
    return RankFacts(rank=rank, local_rank=local, host=host, progress=progress, stack=(INIT_GROUP,), host_facts=memory)


def not_joined(*seen: ProcessFacts, world: int = 2, ranks: tuple[RankFacts, ...] = (waiting(1),)) -> Finding:
    """These processes, which are seen by the next rank."""
    by_rank = {process.rank + 1: process for process in seen}
    seeing = (replace(one, peers=(by_rank[one.rank],)) if one.rank in by_rank else one for one in ranks)
    return first(job(*seeing, world=world, witnessed=seen))


def first(facts: JobFacts) -> Finding:
    finding = judge(facts).findings[0]
    assert finding.rule == "late-at-init", finding.summary
    return finding


@pytest.mark.parametrize("waits_there", [True, False])
def test_a_path_of_its_own_is_why_a_rank_waits_for_it(waits_there: bool) -> None:
    scene = scenes.late_in_setup(GLOO)
    made_at = "/home/me/project/cache.py:28 in __init__"
    loop = replace(scene.ranks[0].stack[-1], line=38, function="wait", code="time.sleep(poll)")
    stack = (*scene.ranks[0].stack[:-1], *((loop,) if waits_there else ()))
    culprit = replace(scene.ranks[0], stack=stack, own_path_at=made_at)
    finding = judge(replace(scene, ranks=(culprit, *scene.ranks[1:]))).findings[0]
    assert (finding.rule, finding.ranks) == ("late-at-init", (0,))
    assert finding.location == (location_of(loop) if waits_there else "")
    assert (finding.decided_at == made_at) == waits_there
    made = "a path that is made of a value which each process computes for itself, at cache.py:28 in __init__."
    assert finding.summary.endswith(f" Rank 0 waits there for {made}") == waits_there
    assert ("broadcast" in finding.remedy) == waits_there


GROWING = process(
    0,
    "running",
    rss_bytes=3_400 * MB,
    swap_bytes=1_100 * MB,
    memory_growth_bytes_per_s=150 * MB,
    swap_growth_bytes_per_s=60 * MB,
    stack=(user("expand", 41, code="rows.append(expanded)"),),
)
WORDS = "3.4 GB resident, growing by 150.0 MB/s, 1.1 GB swapped out (+60.0 MB/s)"


def test_a_rank_that_fills_the_memory_before_it_has_joined() -> None:
    finding = not_joined(GROWING)
    assert finding.summary == (
        f"Rank 0 has not joined the process group, and is at train.py:41 in expand, with {WORDS}; "
        "the host's last 2.1 GB are used up in about 10 s, while rank 1 waits for it in init_process_group."
    )
    assert finding.location.endswith("train.py:41 in expand")
    assert [(item.source, item.rank) for item in finding.evidence] == [("process", 0), ("stack", 0), ("phase", None)]
    assert finding.evidence[0].text == f"Process 1000 is running, {WORDS}."
    assert finding.evidence[1].text.endswith("train.py:41 in expand: rows.append(expanded)")
    assert "too little memory" in finding.remedy
    assert "has been started" not in finding.remedy


def test_one_that_only_grows_is_to_load_lazily() -> None:
    finding = not_joined(replace(GROWING, swap_bytes=0, swap_growth_bytes_per_s=0))
    assert "growing by 150.0 MB/s; the host's last 2.1 GB are used up in about 14 s" in finding.summary
    assert finding.remedy.startswith("It is still filling its memory")


def test_a_rank_that_may_still_be_importing_is_not_blamed_for_memory() -> None:
    finding = not_joined(process(0, "running", rss_bytes=300 * MB, memory_growth_bytes_per_s=5 * MB))
    assert "with 300.0 MB resident, growing by 5.0 MB/s, while" in finding.summary
    assert finding.remedy.startswith("Do this work once and ahead of the job")


def test_one_that_rests_is_to_work_ahead_of_the_job() -> None:
    finding = not_joined(process(0, "sleeping", rss_bytes=3 * GB, memory_growth_bytes_per_s=20_000))
    assert "with 3.0 GB resident, while" in finding.summary
    assert finding.remedy.startswith("Do this work once and ahead of the job")
    # Nobody knows what it does.
    assert finding.remedy.endswith("was started, and read its output.")


def test_one_that_nobody_can_see_is_not_claimed_to_be_there() -> None:
    finding = not_joined(world=3, ranks=(waiting(1),))
    assert (finding.ranks, finding.confidence) == ((0, 2), Confidence.POSSIBLE)
    assert "Ranks 0, 2 have not joined the process group, while rank 1 waits for them" in finding.summary
    assert finding.evidence[0].text.startswith("No process of ranks 0, 2 could be seen from where the others wait")


def test_only_the_growth_on_the_same_host_uses_up_its_memory() -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another; 1 and 3 wait, and each sees its neighbour."""
    there = waiting(3, local_rank=1, host="node-2", memory=HostFacts(memory_available_bytes=9 * GB))
    elsewhere = replace(GROWING, rank=2)
    finding = not_joined(GROWING, elsewhere, world=4, ranks=(waiting(1), there))
    assert "the host's last 2.1 GB are used up in about 10 s" in finding.summary
    both = not_joined(GROWING, elsewhere, world=4, ranks=(waiting(1), waiting(3)))
    assert "the host's last 2.1 GB are used up in about 5.0 s" in both.summary


def test_ranks_of_a_host_need_not_be_consecutive() -> None:
    """As SLURM numbers them if it is asked to: ranks 0 and 2 are on one host, 1 and 3 on another."""
    sees = replace(waiting(2, local_rank=1), peers=(GROWING,))
    others = (waiting(rank, local_rank=rank // 2, host="node-2", memory=HostFacts()) for rank in (1, 3))
    finding = first(job(sees, *others, world=4, witnessed=(GROWING,)))
    assert "the host's last 2.1 GB are used up in about 10 s" in finding.summary


def test_a_rank_that_grows_in_setup_says_so() -> None:
    memory = HostFacts(rss_bytes=5 * GB, memory_growth_bytes_per_s=100 * MB, memory_available_bytes=GB)
    finding = late(memory)
    assert "for 23 s, with 5.0 GB resident, growing by 100.0 MB/s; the host's last 1.0 GB are used" in finding.summary
    assert "5.0 GB resident, growing by 100.0 MB/s in all, 1.0 GB of memory available" in finding.evidence[0].text
    assert finding.remedy.startswith("It is still filling its memory")


def test_one_that_swaps_is_to_need_less_memory_even_while_it_grows() -> None:
    memory = HostFacts(rss_bytes=5 * GB, process_swap_bytes=2 * GB, memory_growth_bytes_per_s=100 * MB)
    finding = late(memory)
    assert "; its host is swapping" in finding.summary
    assert "too little memory" in finding.remedy


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (HostFacts(), ""),
        (HostFacts(rss_bytes=3_400 * MB), "with 3.4 GB resident"),
        (HostFacts(rss_bytes=GB, process_swap_bytes=0), "with 1.0 GB resident"),
        (HostFacts(rss_bytes=GB, memory_growth_bytes_per_s=999_999), "with 1.0 GB resident"),
        (HostFacts(rss_bytes=GB, memory_growth_bytes_per_s=-5 * MB), "with 1.0 GB resident"),
        (HostFacts(rss_bytes=GB, swap_growth_bytes_per_s=5 * MB), "with 1.0 GB resident"),
        (
            HostFacts(rss_bytes=GB, process_swap_bytes=GB, swap_growth_bytes_per_s=5 * MB),
            "with 1.0 GB resident, 1.0 GB swapped out (+5.0 MB/s)",
        ),
        (
            HostFacts(rss_bytes=400 * MB, memory_growth_bytes_per_s=5 * MB),
            "with 400.0 MB resident, growing by 5.0 MB/s",
        ),
        (GROWING, f"with {WORDS}"),
    ],
)
def test_memory_in_words(facts: HostFacts | ProcessFacts, words: str) -> None:
    assert memory_words(facts) == words


def test_memory_that_moves_to_swap_is_no_growth() -> None:
    moved = HostFacts(memory_growth_bytes_per_s=-50 * MB, swap_growth_bytes_per_s=50 * MB)
    assert growth_bytes_per_s(moved) == 0
    assert growth_bytes_per_s(GROWING) == 210 * MB


def grows(mb_per_s: int, rss: int = GB) -> HostFacts:
    return HostFacts(rss_bytes=rss, memory_growth_bytes_per_s=mb_per_s * MB)


@pytest.mark.parametrize(
    ("host", "ranks", "words"),
    [
        (AVAILABLE, [grows(210)], "the host's last 2.1 GB are used up in about 10 s"),
        (AVAILABLE, [grows(105), grows(105)], "the host's last 2.1 GB are used up in about 10 s"),
        (AVAILABLE, [grows(0)], ""),
        # It may be importing torch.
        (AVAILABLE, [grows(210, 300 * MB)], ""),
        (AVAILABLE, [], ""),
        (HostFacts(), [grows(210)], ""),
        # It takes an hour and more.
        (HostFacts(memory_available_bytes=1000 * GB), [grows(200)], ""),
        (
            HostFacts(memory_available_bytes=100 * GB, memory_limit_bytes=4 * GB),
            [grows(50), grows(50)],
            "the control group's last 2.0 GB are used up in about 20 s",
        ),
        # Each of them has such a limit.
        (replace(AVAILABLE, memory_limit_bytes=3 * GB), [grows(5, 2 * GB), grows(5, 2 * GB)], "the host's last 2.1 GB"),
    ],
)
def test_when_memory_is_used_up(host: HostFacts, ranks: list[HostFacts | ProcessFacts], words: str) -> None:
    said = used_up_words(host, ranks)
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.parametrize("seen", [None, process(0, "sleeping")], ids=["unseen", "seen"])
def test_a_rank_outside_of_the_trainer_is_not_frozen(seen: ProcessFacts | None) -> None:
    """It has left the call before, and the others have begun another one; it has no guard that would answer."""
    options = {"phase": Phase.INIT, "batch": -1, "world": 3}
    others = (GLOO.in_barrier(rank, "post_setup", seq=23, **options) for rank in (1, 2))  # type: ignore[arg-type]
    facts = job(*others, world=3, witnessed=() if seen is None else (seen,))
    finding = judge(replace(facts, absent=(0,))).findings[0]
    assert (finding.rule, finding.ranks, finding.confidence) == ("late-at-init", (0,), Confidence.POSSIBLE)
    assert "Rank 0 has not reached this call of the Trainer" in finding.summary
    assert "while ranks 1-2 wait in" in finding.summary
    assert "frozen-rank" not in {finding.rule for finding in judge(replace(facts, absent=(0,))).findings}
    assert judge(facts).findings[0].rule == "frozen-rank"


def outside(*stack: Frame, raised: ExceptionFacts | None = None, state: str = "sleeping") -> Finding:
    """What is told first of rank 0, which is in the program between two calls of the Trainer, or was."""
    seen = process(0, state, stack=(MAIN, *stack), raised=raised)
    others = (GLOO.in_barrier(rank, "pre_setup", seq=23, phase=Phase.INIT, batch=-1, world=3) for rank in (1, 2))
    return judge(replace(job(*others, world=3, witnessed=(seen,)), absent=(0,))).findings[0]


@pytest.mark.parametrize(
    ("condition", "confidence"),
    [("if trainer.is_global_zero:  (line 79)", Confidence.CERTAIN), ("", Confidence.LIKELY)],
)
def test_a_rank_that_waits_between_two_calls_of_the_trainer_has_called_something_alone(
    condition: str, confidence: Confidence
) -> None:
    finding = outside(user("main", 80, condition=condition), BARRIER)
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (0,), confidence)
    assert finding.location.endswith("train.py:80 in main")
    assert ("under `if trainer.is_global_zero:` (line 79)" in finding.summary) is bool(condition)


def test_a_rank_that_works_between_two_calls_of_the_trainer_is_late_for_the_next() -> None:
    finding = outside(user("evaluate", 81), FETCH, user("read", 12))
    assert (finding.rule, finding.ranks, finding.confidence) == ("late-at-init", (0,), Confidence.LIKELY)
    assert finding.location.endswith("train.py:12 in read")


@pytest.mark.parametrize("state", ["running", "gone"])
def test_an_exception_between_two_calls_of_the_trainer_explains_why_a_rank_does_not_come(state: str) -> None:
    error = ExceptionFacts(type="TypeError", message="not serializable", stack=(MAIN, user("write", 82)))
    finding = outside(raised=error, state=state)
    assert (finding.rule, finding.ranks, finding.confidence) == ("failed-rank", (0,), Confidence.CERTAIN)
    assert finding.location.endswith("train.py:82 in write")
    assert finding.plan is Plan.UNKNOWN and "at train.py:82 in write, outside of the Trainer" in finding.summary
    lost = replace(error, is_consequence=True)
    assert outside(raised=lost, state="gone").rule == "dead-rank"


def test_an_exception_that_ended_the_program_within_the_trainer_is_not_said_to_be_outside() -> None:
    """Its guard had no time to report it."""
    error = ExceptionFacts(type="ConnectionResetError", message="", stack=(MAIN, RUN, user("step", 82)))
    finding = outside(raised=error, state="gone")
    assert "at train.py:82 in step, in its call of the Trainer, and its program ended" in finding.summary
    assert finding.evidence[0].text == "ConnectionResetError"


def test_a_rank_outside_of_the_trainer_that_is_gone_is_dead() -> None:
    others = (GLOO.waiting(rank, seq=23, world=3) for rank in (1, 2))
    facts = replace(job(*others, world=3, witnessed=(process(0, "gone"),)), absent=(0,))
    assert judge(facts).findings[0].rule == "dead-rank"
    assert "late-at-init" not in {finding.rule for finding in judge(facts).findings}


def test_a_rank_that_is_in_prepare_data_is_not_told_to_go_there() -> None:
    late_in_setup = scenes.late_in_setup(GLOO)
    culprit, *others = late_in_setup.ranks
    culprit = replace(culprit, host_facts=AVAILABLE)

    def remedy(hook: str) -> str:
        actions = (Action(name=f"[LightningDataModule]Data.{hook}", for_s=30),)
        preparing = replace(culprit, progress=replace(culprit.progress, actions=actions))
        return judge(replace(late_in_setup, ranks=(preparing, *others))).findings[0].remedy

    assert "or in prepare_data" in remedy("setup")
    assert "in a separate script" in remedy("prepare_data") and "or in prepare_data" not in remedy("prepare_data")


def test_the_child_that_a_late_rank_waits_for_is_named() -> None:
    late_in_setup = scenes.late_in_setup(GLOO)
    culprit, *others = late_in_setup.ranks
    shell = ChildProcess(pid=712, parent=7, command="sh -c", state="sleeping", wait_channel="do_wait", age_s=30.2)
    ended = ChildProcess(pid=713, parent=712, state="zombie")
    unknown = ChildProcess(pid=714, parent=713)
    waits = replace(late_in_setup, ranks=(replace(culprit, awaited_processes=(shell, ended, unknown)), *others))
    told = [evidence.text for evidence in judge(waits).findings[0].evidence if "process 71" in evidence.text]
    assert told == [
        "Waits for its child process 712 (sh -c): sleeping in do_wait, started 30 s ago.",
        "Process 712 has started process 713: "
        "it has ended, and a process that it has started may keep its output open.",
        "Process 713 has started process 714.",
    ]


def test_swap_is_not_mentioned_for_a_host_that_does_not_swap() -> None:
    memory = HostFacts(rss_bytes=GB, process_swap_bytes=0, swap_used_bytes=0, swapped_in_bytes=0)
    told = [evidence.text for evidence in late(memory).evidence if evidence.source == "host"]
    assert told == ["1.0 GB resident."]
