"""SLURM's signal stops a rank as SIGTERM does, and one rank has the job queued again, once."""

import os
import signal
from pathlib import Path

import pytest
from test_stop_signal import Agreement, Stopped, Trainer

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.sigterm.handler import StopSignal, requeue_once


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What scontrol was called with; one that fails, if there is a file of that name."""
    fails = f'if [ -e {tmp_path}/fails ]; then echo "no such job" >&2; exit 1; fi'
    (program := tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{fails}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "asked"


def requeue(ranks: int, environ: dict[str, str], exchange: type[MemoryExchange] = MemoryExchange) -> list[str]:
    said: list[str] = []
    shared = SharedMemory()
    for rank in range(ranks):
        requeue_once(exchange(shared), rank, said.append, environ)
    return said


def test_one_rank_requeues_for_all(asked: Path) -> None:
    assert requeue(3, {"SLURM_JOB_ID": "4711"}) == ["rank 0 requeued SLURM job 4711"]
    assert asked.read_text() == "requeue 4711\n"


def test_an_array_task_is_requeued_alone(asked: Path) -> None:
    requeue(1, {"SLURM_JOB_ID": "4712", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "1"})
    assert asked.read_text() == "requeue 4711_1\n"


def test_the_answer_of_slurm_is_printed(asked: Path) -> None:
    asked.with_name("fails").touch()
    assert requeue(1, {"SLURM_JOB_ID": "4711"}) == ["rank 0 could not requeue SLURM job 4711: no such job"]


class Lost(MemoryExchange):
    def set_if_absent(self, key: str, value: bytes) -> bytes:
        raise ExchangeError("its host is gone")


def test_without_an_exchange_rank_0_requeues(asked: Path) -> None:
    requeue(3, {"SLURM_JOB_ID": "4711"}, Lost)
    assert asked.read_text() == "requeue 4711\n"


def test_without_slurm_nothing_is_requeued(asked: Path) -> None:
    assert requeue(1, {}) == []
    assert not asked.exists()


@pytest.mark.parametrize("takes", [True, False])
def test_the_slurm_signal_stops_before_the_next_batch(takes: bool) -> None:
    trainer, agreement, saved = Trainer(), Agreement(), list[int]()
    connector = trainer._signal_connector
    connector._slurm_sigusr_handler_fn = lambda signum, frame: saved.append(signum)  # type: ignore[attr-defined]
    stop = StopSignal(trainer, agreement, Stopped, takes_slurms=takes)
    stop.attach()
    trainer.loop.advance("first")
    connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[attr-defined]
    agreement.poll()
    assert stop.is_to_requeue is takes
    if not takes:
        assert saved == [signal.SIGUSR1], "Lightning's own"
        trainer.loop.advance("second")
        stop.detach()
        return
    # SLURM's SIGTERM may follow.
    trainer.signal()
    with pytest.raises(Stopped):
        trainer.loop.advance("second")
    assert trainer.loop.trained == ["first"] and saved == []
    stop.detach()
