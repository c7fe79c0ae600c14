"""What the guards of several ranks do together."""

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standing import seen
from thread_ranks import HandMadeProbe, Job, wait_on_all_but

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import DirectoryExchange, FallbackExchange, wait_for
from lightning_ncclsafe.facts import Incident, IncidentKind, Phase, ProcessFacts, Progress, RankFacts
from lightning_ncclsafe.guard import after_verdict, leaving
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.leaving import Leaving
from lightning_ncclsafe.guard.shared import IncidentEntry, IncidentLog, Place
from lightning_ncclsafe.probes.rank_info import RankInfo
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.rules.kit.activity import activity
from lightning_ncclsafe.settings import Limits


def test_a_rank_that_waits_too_long_makes_all_say_what_they_do(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["rule"] == "rank-zero-only-work"  # type: ignore[index]
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]
    assert len(report["job"]["ranks"]) == 3  # type: ignore[index,call-overload]
    assert "train.py:42" in job.said[0].splitlines()[0]
    assert not job.ended


def test_a_rank_that_works_long_and_keeps_nobody_waiting_is_left_alone(make_job: Callable[..., Job]) -> None:
    job = make_job()
    glances = threading.Semaphore(0)
    for probe in job.probes:
        look = probe.snapshot
        probe.snapshot = lambda idle_s, look=look: (glances.release(), look(idle_s))[1]  # type: ignore[method-assign]
    job.start()
    for _ in range(4):
        assert glances.acquire(timeout=20)
    assert not job.said
    assert not job.folder.exists()


def test_recovery_is_one_line_and_a_second_incident_has_its_own_folder(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 1)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    for probe in job.probes:
        probe.waits, probe.batch = False, 1
    job.wait_for(lambda: len(job.said) == 2)
    assert job.said[1].startswith("recovered after")
    wait_on_all_but(job, 2)
    job.wait_for(lambda: len(job.said) == 3)
    assert [report["job"]["incident"]["number"] for report in job.reports()] == [1, 2]  # type: ignore[index,call-overload]


class ToldNumbers(IncidentNumbers):
    """Somebody waits for them."""

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self.changed = changed

    def note(self, number: int) -> None:
        with self.changed:
            super().note(number)
            self.changed.notify_all()


def test_numbers_go_on_from_call_to_call(make_job: Callable[..., Job]) -> None:
    changed = threading.Condition()
    numbers = [ToldNumbers(changed) for _ in range(3)]
    for expected in (1, 2):
        job = make_job(incidents=numbers, changed=changed)
        wait_on_all_but(job, 0)
        job.start()
        job.wait_for(lambda: all(one.last == expected for one in numbers))  # noqa: B023
        job.stop()
        assert f"-incident-{expected}" in job.said[0]


def test_at_the_limit_only_what_is_new_is_printed(make_job: Callable[..., Job]) -> None:
    job, limits_s = make_job(), dict[str, float]()
    job.limits = replace(job.limits, phases_s=limits_s)
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    limits_s["train"] = 0.2  # which they have waited for by now, or will have
    job.wait_for(lambda: set(job.ended) == {0, 1, 2})
    first, last = job.said
    assert first.startswith("rank-zero-only-work: ") and "remedy: " in first
    assert last.startswith("still rank-zero-only-work after ") and "remedy: " not in last
    assert len(last.splitlines()) == 4 and "incident-1" in last and "\nnext: stop: " in last
    (report,) = job.reports()
    assert report["findings"][0]["remedy"]  # type: ignore[index]


def test_the_final_report_is_written_before_any_rank_is_ended(make_job: Callable[..., Job]) -> None:
    job = make_job(timeout_s=0.5)
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.ended) > 0)
    kinds = [report["job"]["incident"]["kind"] for report in job.reports()]  # type: ignore[index,call-overload]
    assert kinds == ["timeout"]
    job.wait_for(lambda: set(job.ended) == {0, 1, 2})


def test_on_timeout_report_ends_nothing(make_job: Callable[..., Job]) -> None:
    job, limits_s = make_job(on_timeout="report"), dict[str, float]()
    job.limits = replace(job.limits, phases_s=limits_s)
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    limits_s["train"] = 0.2  # see above: only now, however slow this machine is
    job.wait_for(lambda: len(job.said) == 2)
    assert [report["job"]["incident"]["kind"] for report in job.reports()] == ["timeout"]  # type: ignore[index,call-overload]
    assert not job.ended


def test_an_exception_reaches_the_report_before_the_rank_leaves(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 2)
    job.start()
    assert job.guards[2].failed(ValueError("the batch is broken")) is None
    (report,) = job.reports()
    assert report["findings"][0]["rule"] == "failed-rank"  # type: ignore[index]
    assert "rank 2 raised ValueError" in job.said[0].replace("Rank", "rank")


def test_the_others_get_the_cause_instead_of_the_broken_connection(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 2)
    job.start()
    job.guards[2].failed(ValueError("the batch is broken"))
    error = job.guards[0].failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert isinstance(error, CollectiveTimeoutError)
    assert "ValueError" in str(error)
    assert error.findings[0].ranks == (2,)
    assert error.report_folder
    assert len(job.reports()) == 1


def test_a_rank_that_meets_the_others_leaves_as_soon_as_one_has_raised(make_job: Callable[..., Job]) -> None:
    """Over keys and files it would wait on for a minute, long after the process of the other is gone."""
    job = make_job()
    wait_on_all_but(job, 2)
    job.start()
    job.guards[0].check()
    job.guards[2].failed(ValueError("the batch is broken"))
    job.wait_for(lambda: job.guards[0].ends_run)
    with pytest.raises(CollectiveTimeoutError, match="ValueError") as raised:
        job.guards[0].check()
    # It leaves as one does whose connection broke, and not as the cause.
    error = job.guards[0].failed(raised.value)
    assert isinstance(error, CollectiveTimeoutError) and error.findings[0].ranks == (2,)
    assert len(job.reports()) == 1


def test_all_save_with_a_rank_that_raised_though_they_wait_on_before_they_leave(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    wait_on_all_but(job, 2)
    job.start()
    job.guards[2].failed(ValueError("the batch is broken"))
    job.wait_for(lambda: len(job.saved) == 3)
    assert job.saved == {(0, False), (1, False), (2, True)}
    assert not job.ended


def test_a_rank_that_waits_for_one_that_raised_is_ended_without_waiting_for_the_limit(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    wait_on_all_but(job, 2)
    job.start()
    job.guards[2].failed(ValueError("the batch is broken"))
    job.wait_for(lambda: set(job.ended) >= {0, 1})
    assert 2 not in job.ended


def test_an_exception_before_the_process_group_exists_is_reported_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    exchanges = [DirectoryExchange(tmp_path / "init") for _ in range(2)]
    probes = [HandMadeProbe(rank, 2) for rank in range(2)]
    guards = [
        Guard(
            place=Place(rank=rank, local_rank=rank, world_size=2, local_world_size=2),
            limits=Limits(suspect_after_s=900.0, timeout_s=1000.0, on_timeout="abort"),
            report_dir=tmp_path / "reports",
            exchange=exchanges[rank],
            probe=probes[rank],  # type: ignore[arg-type]
            say=said.append,
        )
        for rank in range(2)
    ]
    guards[0].start()
    guards[0].failed(ValueError("no such interface"))
    for guard in guards:
        guard.close()
    assert "no such interface" in said[0]


def test_the_same_exception_on_all_ranks_is_no_hang_and_needs_no_report(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()

    def fail(guard: Guard) -> None:
        try:
            raise ValueError("everywhere")
        except ValueError as error:
            guard.failed(error)

    threads = [threading.Thread(target=fail, args=(guard,)) for guard in job.guards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not job.said
    assert not job.folder.exists()
    assert [numbers.last for numbers in job.incidents] == [0, 0, 0], "the first that is told is incident 1"


def test_a_silent_rank_is_looked_at_by_its_neighbour(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 1)
    job.start(without=1)
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["rule"] == "stopped-process"  # type: ignore[index]
    assert report["findings"][0]["ranks"] == [1]  # type: ignore[index]


def test_rank_1_reports_when_rank_0_is_silent(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 0)
    job.start(without=0)
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]


def test_a_rank_that_finishes_early_stays_to_answer_and_leaves_with_the_error(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.probes[0].waits, job.probes[0].batch = True, 9
    job.start()
    with pytest.raises(CollectiveTimeoutError, match=r"[Rr]ank 1"):
        job.guards[1].finish()
    (report,) = job.reports()
    assert report["findings"][0]["rule"] == "uneven-batches"  # type: ignore[index]


def test_ranks_that_finish_together_say_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.start()
    threads = [threading.Thread(target=guard.finish) for guard in job.guards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not job.said


def test_a_rank_that_has_finished_leaves_one_that_works_on_and_says_where_it_is(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LINGER_S", 0.2)
    job = make_job(world_size=2)
    job.start()
    job.guards[1].finish()
    (said,) = job.said
    assert said.startswith("unfinished-rank: Rank 0 has not finished: in x at train.py:42 in evaluate")
    (report,) = job.reports()
    assert [facts["rank"] for facts in report["job"]["ranks"]] == [0, 1]  # type: ignore[index,call-overload]
    # It is no incident of the rank that works on: nothing recovers, and nobody is ended.
    job.guards[0].finish()
    assert len(job.said) == 1
    assert not job.ended


def test_ranks_that_leave_without_another_one_name_it_once(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LINGER_S", 0.2)
    job = make_job()
    job.start()
    threads = [threading.Thread(target=job.guards[rank].finish) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    (report,) = job.reports()
    assert report["findings"][0]["rule"] == "unfinished-rank"  # type: ignore[index]
    assert report["findings"][0]["ranks"] == [1]  # type: ignore[index]
    assert len(job.said) == 1


def test_an_incident_whose_opener_has_gone_is_closed_by_another_rank(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.probes[1].waits = True
    job.start(without=2)
    job.wait_for(lambda: len(job.said) == 1)
    job.guards[1].close()
    job.probes[0].waits, job.probes[0].batch = False, 5
    job.wait_for(lambda: any(text.startswith("recovered") for text in job.said))


def test_no_rank_stays_for_ever_for_one_that_has_gone(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LINGER_S", 0.2)
    job = make_job(world_size=2, timeout_s=0.5, on_timeout="report")
    job.probes[1].waits = True
    job.start()
    job.wait_for(lambda: len(job.said) >= 1)
    job.guards[1].close()
    job.guards[0].finish()


def test_the_same_exception_a_moment_apart_is_no_alarm(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()

    def fail(guard: Guard) -> None:
        try:
            raise ValueError("pruned")
        except ValueError as error:
            guard.failed(error)

    first = threading.Thread(target=fail, args=(job.guards[0],))
    first.start()
    first.join(0.4)
    fail(job.guards[1])
    first.join(20)
    assert not job.said


def test_keys_of_an_earlier_job_mean_nothing_to_the_next_one(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.probes[0].info = replace(job.probes[0].info, started=4e9)
    stale = IncidentLog(job.exchanges[0])
    stale.write(IncidentEntry(incident=Incident(number=1, kind=IncidentKind.TIMEOUT, opened_by=0, opened_ns=1)))
    log = IncidentLog(job.exchanges[1], not_before_ns=int(job.probes[0].info.started * 1e9))
    assert log.read() is None
    assert log.number == 1


def test_a_failure_of_the_guard_itself_is_reported_once_and_harms_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.probes[1].broken = KeyError("our own mistake")
    wait_on_all_but(job)
    job.start()
    job.wait_for(lambda: any("our own mistake" in text for text in job.said))
    assert job.guards[1].failed(ValueError("x")) is None
    job.guards[1].finish()
    assert sum("our own mistake" in text for text in job.said) == 1


def test_a_lost_store_is_replaced_by_files_and_reported(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(world_size=2)
    firsts = [*job.exchanges]
    job.exchanges = [FallbackExchange(first, DirectoryExchange(tmp_path / "exchange")) for first in firsts]
    wait_on_all_but(job, 0)
    for probe in job.probes:
        probe.waits = False
    job.start()
    for first in firsts:
        first.close()
    wait_on_all_but(job, 0)
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert len(report["job"]["ranks"]) == 2  # type: ignore[index,call-overload]
    assert "closed" in report["job"]["missing"][0]  # type: ignore[index,call-overload]


def test_without_any_exchange_each_rank_reports_alone(make_job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = make_job(world_size=2)
    firsts = [*job.exchanges]
    job.exchanges = [FallbackExchange(first, DirectoryExchange(tmp_path / "file" / "x")) for first in firsts]
    job.start()
    for first in firsts:
        first.close()
    job.probes[1].waits = True
    job.wait_for(lambda: len(job.said) >= 1)
    assert "guard failed" not in job.said[0]


def test_a_report_folder_that_cannot_be_written_costs_the_folder_only(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(world_size=2)
    (tmp_path / "file").write_text("in the way")
    job.folder = tmp_path / "file" / "reports"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    assert "train.py:42" in job.said[0]
    (report,) = tmp_path.glob("ncclsafe-*/*/report.json")
    assert job.said[0].endswith(f"report: {report.parent} (nothing could be written to {job.folder})")


@pytest.mark.parametrize("name", ["failed", "finish"])
def test_a_main_thread_that_its_guard_keeps_waits_for_the_others(name: str, make_job: Callable[..., Job]) -> None:
    """Until a report about its exception is there, or until all have finished."""
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start(without=0)
    guard = job.guards[0]  # its watch is off: nobody asks, and nobody answers
    calls = {"failed": lambda: guard.failed(ValueError("x")), "finish": guard.finish}

    def release() -> None:
        guard._own.state.exception_is_reported.set()
        guard._own.state.is_off = True

    stack = seen(calls[name], getattr(Leaving, name), release)
    facts = RankFacts(rank=0, progress=Progress(phase=Phase.TRAIN), stack=stack)
    assert activity(facts).waits_for_peers


def test_a_signal_whose_handler_raises_does_not_cut_the_report_of_an_exception_short(
    make_job: Callable[..., Job],
) -> None:
    """As torch's for a worker that was killed, just after the exception that this has caused."""
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start(without=0)
    guard = job.guards[0]
    raised: list[int] = []

    def handler(signum: int, frame: object) -> None:
        raised.append(signum)
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed.")

    def disturb() -> None:
        assert wait_for(lambda: guard._own.probe.exception is not None, deadline_s=10.0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert wait_for(lambda: bool(raised), deadline_s=10.0)
        guard._own.state.exception_is_reported.set()

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=disturb)
    try:
        thread.start()
        error = ConnectionResetError("peer")
        assert leave(guard, error) is error
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert raised and guard._own.state.main_thread_left.is_set()


def leave(guard: Guard, error: BaseException) -> BaseException:
    """A rank raises, and its guard is told."""
    try:
        raise error
    except BaseException as raised:
        guard.failed(raised)
        return raised


def in_a_stage(error: BaseException) -> BaseException:
    """The exception, as if Lightning's loops had been left by it."""
    file = "/site-packages/lightning/pytorch/trainer/trainer.py"
    names: dict[str, Any] = {"error": error}
    exec(compile("def _run_stage():\n    raise error", file, "exec"), names)
    with pytest.raises(BaseException) as raised:
        names["_run_stage"]()
    return raised.value


def test_an_exit_of_one_rank_while_others_train_is_no_success(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 2)
    job.start()
    error = leave(job.guards[2], in_a_stage(SystemExit(0)))
    assert isinstance(error, SystemExit) and error.code == 1
    assert "Rank 2 left the others by SystemExit with status 0" in job.said[0]
    assert "the run cannot continue" in job.said[0]


def test_an_exit_of_all_ranks_is_what_it_says(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()
    errors = [in_a_stage(SystemExit(0)) for _ in job.guards]
    threads = [threading.Thread(target=leave, args=one) for one in zip(job.guards, errors, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [error.code for error in errors if isinstance(error, SystemExit)] == [0, 0, 0]
    assert not job.said


def test_an_exit_once_all_others_have_finished_is_what_it_says(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()
    finishing = [threading.Thread(target=guard.finish) for guard in job.guards[:2]]
    for thread in finishing:
        thread.start()
    for probe in job.probes[:2]:
        probe.finished = True
    error = leave(job.guards[2], in_a_stage(SystemExit()))
    assert isinstance(error, SystemExit) and error.code is None
    for thread in finishing:
        thread.join(20)
        assert not thread.is_alive(), "it waits for a rank that has left"
    assert not job.said and not job.folder.exists()


def test_an_exit_after_the_loops_waits_for_the_others_as_the_end_does(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()
    error = SystemExit(0)
    leaving = threading.Thread(target=leave, args=(job.guards[1], error))
    leaving.start()
    job.guards[0].finish()
    leaving.join(20)
    assert not leaving.is_alive()
    assert error.code == 0 and job.probes[1].finished
    assert not job.said


def test_why_a_rank_was_interrupted_is_known_to_one_whose_connection_breaks(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    wait_on_all_but(job, 1)
    job.limits = replace(job.limits, suspect_after_s=900.0)
    job.start()
    leave(job.guards[1], KeyboardInterrupt())
    job.guards[1].close()
    assert not job.said
    error = job.guards[0].failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert "Rank 1 was interrupted (KeyboardInterrupt" in str(error)


def test_a_rank_whose_run_is_ended_leaves_after_the_one_that_has_failed(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(world_size=2)
    monkeypatch.setattr(after_verdict, "_FAILED_LEAVE_S", 60.0)
    states = iter(["running", "running", "zombie"])
    asked: list[int] = []

    def look_at(peer: RankInfo) -> ProcessFacts:
        asked.append(peer.rank)
        return ProcessFacts(pid=peer.pid, rank=peer.rank, state=next(states))

    wait_on_all_but(job, 1)
    job.start()
    job.guards[1].failed(ValueError("the batch is broken"))
    job.probes[0].peers.look_at = look_at  # type: ignore[method-assign]
    error = job.guards[0].failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert isinstance(error, CollectiveTimeoutError)
    assert asked == [1, 1, 1]


def test_a_rank_that_still_waits_is_ended_after_the_one_that_has_failed(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has broken its wait: the process of the rank that has failed still ends, on a busy machine for long."""
    job = make_job(world_size=2)
    monkeypatch.setattr(after_verdict, "_FAILED_LEAVE_S", 60.0)
    was_asked, has_left = threading.Event(), threading.Event()

    def look_at(peer: RankInfo) -> ProcessFacts:
        was_asked.set()
        return ProcessFacts(pid=peer.pid, rank=peer.rank, state="zombie" if has_left.is_set() else "running")

    wait_on_all_but(job, 1)
    job.start()
    job.probes[0].peers.look_at = look_at  # type: ignore[method-assign]
    job.guards[1].failed(ValueError("the batch is broken"))
    assert was_asked.wait(20)
    assert 0 not in job.ended
    has_left.set()
    job.wait_for(lambda: 0 in job.ended)


def test_a_rank_whose_wait_breaks_as_the_failed_one_leaves_is_not_ended(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.start()
    job.guards[1].failed(ValueError("the batch is broken"))
    state = job.guards[0]._own.state
    assert wait_for(lambda: state.verdict, deadline_s=20.0)

    def look_at(peer: RankInfo) -> ProcessFacts:
        state.main_thread_left.set()
        return ProcessFacts(pid=peer.pid, rank=peer.rank, state="zombie")

    job.probes[0].peers.look_at = look_at  # type: ignore[method-assign]
    job.guards[0]._leaving._after_verdict.end()
    assert state.main_thread_left.is_set()
    assert 0 not in job.ended


def test_the_first_rank_of_another_host_says_in_a_line_why_it_ends(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=2)
    job.probes[0].info = replace(job.probes[0].info, host="node-a")
    job.local_ranks = (0, 0)
    job.start()
    job.guards[0].failed(ValueError("the batch is broken"))
    job.wait_for(lambda: len(job.said) == 2)
    assert job.said[1].startswith("rank 1: ending the run: Rank 0 raised ValueError")
    assert "; report on node-a: " in job.said[1]
    assert ".;" not in job.said[1]
