"""What ranks seen from outside have raised: whether it has ended their work, or their code has caught it."""

from pathlib import Path
from textwrap import dedent

import pytest

from lightning_ncclsafe.facts import Frame, ProcessFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.inspecting.diagnosing import diagnosis_of
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts, shows_enough
from lightning_ncclsafe.inspecting.looks import Look, SeenFrame, SeenThread
from lightning_ncclsafe.inspecting.objects import ReadException
from lightning_ncclsafe.inspecting.rank_objects import RankObjects, errors_of, is_past_program
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.probes.process.main_thread import ThreadLook

SITE = "/venv/lib/python3.12/site-packages"
CALL = (f"{SITE}/lightning/pytorch/trainer/call.py", 60, "_call_and_handle_interrupt")
BARRIER = SeenFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 5, "barrier")
PROGRAM = """\
def train():
    try:
        step()
    except KeyError:
        barrier()
    finally:
        barrier()


def pass_on():
    try:
        step()
    except KeyError:
        barrier()
        raise


def step():
    raise KeyError("label")


train()
"""
CAUGHT, FINALLY, RAISES_AGAIN = 5, 7, 14


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(dedent(PROGRAM))
    return str(path)


def raised(program: str, *, function: str = "train", type: str = "KeyError", message: str = "'label'") -> ReadException:
    return ReadException(type=type, message=message, places=((program, 3, function), (program, 19, "step")))


def seen(
    number: int, *frames: SeenFrame, handled: tuple[ReadException, ...] = (), left: tuple[ReadException, ...] = ()
) -> SeenRank:
    looks = tuple(
        Look(
            at_s=at_s,
            threads=(SeenThread(name="MainThread", is_main=True, frames=frames),),
            main_thread=ThreadLook(state="sleeping", ran_s=0.0, queued_s=0.0),
            process=ProcessFacts(pid=7, state="sleeping"),
        )
        for at_s in (0.0, 1.0, 2.0)
    )
    of = {"local_rank": number, "local_world_size": 2, "world_size": 2, "job": "node1:29500", "parent": 1}
    process = RankProcess(pid=100 + number, rank=number, **of)  # type: ignore[arg-type]
    return SeenRank(process=process, looks=looks, objects=RankObjects(handled=handled, left=left))


def judged(*ranks: SeenRank) -> Diagnosis:
    return diagnosis_of(job_facts(ranks, taken_ns=1))


def waiting(program: str) -> SeenRank:
    return seen(0, SeenFrame(program, 22, "<module>"), BARRIER)


@pytest.mark.parametrize(
    ("function", "line", "is_caught"),
    [("train", CAUGHT, True), ("train", FINALLY, False), ("pass_on", RAISES_AGAIN, False)],
)
def test_a_swallowing_block_catches_and_a_reraising_one_does_not(
    program: str, function: str, line: int, is_caught: bool
) -> None:
    stack = (Frame(file=program, line=line, function=function, user=True),)
    exception, caught = errors_of(RankObjects(handled=(raised(program, function=function),)), stack, 3.0)
    assert (exception is None, len(caught)) == (is_caught, int(is_caught))
    for one in (exception, *caught):
        if one is not None:
            assert (one.type, one.message, one.stack[-1].line) == ("KeyError", "'label'", 19)
            assert one.stack[-1].code == 'raise KeyError("label")'


def test_an_exception_that_left_the_trainer_ends_it_even_if_caught(program: str) -> None:
    stack = (Frame(file=program, line=CAUGHT, function="train", user=True),)
    one = ReadException(type="KeyError", places=((program, 3, "train"), CALL, (program, 19, "step")))
    # What has come while it was being ended is not what has ended it.
    later = raised(program, type="OSError")
    objects = RankObjects(handled=(later, one))
    assert objects.has_failed
    exception, caught = errors_of(objects, stack)
    assert exception is not None and (exception.type, caught) == ("KeyError", ())


@pytest.mark.parametrize("type", ["StopIteration", "GeneratorExit", "_TunerExitException"])
def test_exits_without_an_error_are_ignored(program: str, type: str) -> None:
    assert errors_of(RankObjects(handled=(raised(program, type=type),)), ()) == (None, ())
    assert not RankObjects(handled=(ReadException(type=type, places=(CALL,)),)).has_failed


def test_without_source_an_exception_counts_as_caught() -> None:
    stack = (Frame(file="/nowhere/train.py", line=3, function="train", user=True),)
    exception, caught = errors_of(RankObjects(handled=(raised("/nowhere/train.py"),)), stack)
    assert exception is None and caught[0].is_held


def test_a_rank_waiting_in_its_cleanup_has_failed(program: str) -> None:
    frames = (SeenFrame(program, 22, "<module>"), SeenFrame(program, FINALLY, "train"), BARRIER)
    first = judged(waiting(program), seen(1, *frames, handled=(raised(program),))).findings[0]
    assert (first.rule, first.ranks, first.location) == ("failed-rank", (1,), f"{program}:19 in step")
    # A loop around it may catch it yet.
    assert first.confidence is Confidence.LIKELY
    assert "KeyError: 'label'" in first.summary and "rank 0 waits" in first.summary


def test_an_uncaught_exception_is_enough_to_answer_at_once(program: str) -> None:
    shutdown = SeenFrame("/usr/lib/python3.12/threading.py", 9, "_shutdown")
    ranks = (waiting(program), seen(1, shutdown, left=(raised(program),)))
    assert shows_enough(ranks) and not shows_enough((waiting(program), seen(1, shutdown)))
    first = judged(*ranks).findings[0]
    assert (first.rule, first.ranks) == ("failed-rank", (1,))


def test_a_program_is_over_in_atexit_and_not_in_a_module() -> None:
    meets, runs = SeenFrame("/home/ada/train.py", 9, "meet"), SeenFrame("<frozen runpy>", 9, "_run_module_as_main")
    main = SeenFrame("/home/ada/train.py", 22, "<module>")
    shutdown = SeenFrame("/usr/lib/python3.12/threading.py", 9, "_shutdown")
    assert all(map(is_past_program, [(meets, BARRIER), (shutdown,), (shutdown, meets)]))
    assert not any(map(is_past_program, [(), (main, meets, BARRIER), (runs, main, meets), (runs, meets)]))


def test_a_rank_still_handling_an_exception_has_diverged(program: str) -> None:
    frames = (SeenFrame(program, 22, "<module>"), SeenFrame(program, CAUGHT, "train"), BARRIER)
    first = judged(waiting(program), seen(1, *frames, handled=(raised(program),))).findings[0]
    assert (first.rule, first.ranks, first.location) == ("diverged-collectives", (1,), f"{program}:19 in step")
    assert f"in the `except` block (line {CAUGHT}) that caught KeyError: 'label'" in first.summary


def test_a_connection_error_is_a_consequence(program: str) -> None:
    lost = raised(program, type="RuntimeError", message="[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    frames = (SeenFrame(program, 22, "<module>"), SeenFrame(program, FINALLY, "train"), BARRIER)
    diagnosis = judged(waiting(program), seen(1, *frames, handled=(lost,)))
    assert all(finding.rule != "failed-rank" for finding in diagnosis.findings)
    facts = next(facts for facts in diagnosis.job.ranks if facts.rank == 1)
    assert facts.exception is not None and facts.exception.is_consequence
