"""Which rank saves, in which order ranks try, and that none waits for ever: ranks are threads."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from lightning_ncclsafe.checkpoints import saving
from lightning_ncclsafe.checkpoints.boundary import NO_STEP, Boundary, NotProvenError
from lightning_ncclsafe.checkpoints.candidates import Candidate, savers, why_none
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.checkpoints.saving import Saver
from lightning_ncclsafe.exchange import Exchange, ExchangeError, MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.settings import CheckpointSettings


def able(rank: int, step: int = 5, **more: Any) -> Candidate:
    return Candidate(rank=rank, step=step, **more)


@pytest.mark.parametrize(
    ("candidates", "order"),
    [
        ([able(1), able(0)], [0, 1]),
        ([able(0, raised=True), able(1), able(2)], [1, 2, 0]),
        ([Candidate(rank=0, why="in the middle of a step"), able(1)], [1]),
        # A rank that has made the step has it of all ranks' gradients; those that have not are a step behind.
        ([able(0, 4), able(1, 5), able(2, 5)], [1, 2]),
        ([Candidate(rank=0, why="x")], []),
        ([], []),
    ],
)
def test_savers_are_tried_in_order(candidates: Sequence[Candidate], order: list[int]) -> None:
    assert [each.rank for each in savers(candidates)] == order


def test_the_reason_for_no_save_is_printed_once_for_all_ranks() -> None:
    middle = "in the middle of a step"
    candidates = [Candidate(rank=0, why=middle), Candidate(rank=2, why=middle), Candidate(rank=3, why="torn")]
    assert why_none(candidates, [""] * 5) == f"ranks 0, 2: {middle}; rank 3: torn; ranks 1, 4: no answer"


class Noted:
    """A ledger that has one boundary, or none."""

    def __init__(self, step: int = 5, *, why: str = "", why_then: str = "") -> None:
        self.why, self.why_then = why, why_then
        self.boundary = Boundary(
            step=step,
            epoch=1,
            counts=[],
            batches_that_stepped=step,
            schedulers=[],
            groups=[],
            is_over=True,
            position={"seed": step},
        )

    is_on_device = is_in_step = False

    def newest(self) -> Boundary:
        if self.why:
            raise NotProvenError(self.why)
        return self.boundary

    def check(self, boundary: Boundary) -> None:
        if self.why_then:
            raise NotProvenError(self.why_then)


class Rank:
    def __init__(
        self, exchange: Exchange, rank: int, world_size: int, folder: Path, ledger: Noted, **settings: Any
    ) -> None:
        self.said: list[str] = []
        self.saver = Saver(
            SimpleNamespace(),
            CheckpointSettings(dirpath=folder, run=f"run {rank}"),
            ledger,  # type: ignore[arg-type]
            weights=dict,
            rank=rank,
            world_size=world_size,
            exchange=exchange,
            say=self.said.append,
            **settings,
        )

    def save(self, budget_s: float = 5.0) -> None:
        self.saver.begin("dead-rank", budget_s=budget_s)
        self.saver.wait()


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint has in it is no matter here."""
    monkeypatch.setattr(saving, "contents", lambda trainer, ledger, boundary, weights: {"step": boundary.step})


def job(
    folder: Path, *ledgers: Noted | None, through: type[MemoryExchange] = MemoryExchange, **settings: Any
) -> list[Rank]:
    """Ranks that share a memory; those without a ledger are dead."""
    shared = SharedMemory()
    found = [(rank, ledger) for rank, ledger in enumerate(ledgers) if ledger is not None]
    return [Rank(through(shared), rank, len(ledgers), folder, ledger, **settings) for rank, ledger in found]


def save_all(ranks: Sequence[Rank], budget_s: float = 5.0) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [threads.submit(rank.save, budget_s) for rank in ranks]:
            done.result(30)
    return [line for rank in ranks for line in rank.said]


def saved(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.ckpt"))]


def test_one_rank_saves_the_positions_of_all(tmp_path: Path) -> None:
    said = save_all(job(tmp_path, Noted(), Noted(), Noted()))
    (checkpoint,) = saved(tmp_path)
    ours = checkpoint.pop("lightning_ncclsafe")
    assert ours["positions"] == {0: {"seed": 5}, 1: {"seed": 5}, 2: {"seed": 5}}
    assert (ours["version"], ours["world_size"], ours["cause"]) == (1, 3, "dead-rank")
    assert len(said) == 1 and "rank 0 saved the state after step 5 in " in said[0]


def test_a_dead_rank_does_not_delay_the_save(tmp_path: Path) -> None:
    began = time.monotonic()
    said = save_all(job(tmp_path, None, Noted(), Noted()), budget_s=60.0)
    assert time.monotonic() - began < 30.0
    (checkpoint,) = saved(tmp_path)
    assert checkpoint["lightning_ncclsafe"]["positions"] == {0: None, 1: {"seed": 5}, 2: {"seed": 5}}
    assert ["rank 1 saved" in line for line in said] == [True]


def test_the_next_rank_saves_if_one_cannot_write(tmp_path: Path) -> None:
    ranks = job(tmp_path, Noted(why_then="training continued meanwhile"), Noted())
    said = save_all(ranks)
    assert len(saved(tmp_path)) == 1
    assert (
        "rank 0 saved no checkpoint of step 5: training continued meanwhile; this run has no earlier checkpoint"
        in said[0]
    )
    assert "rank 1 saved the state" in said[1]


def test_an_unproven_state_is_not_saved_and_reported_once(tmp_path: Path) -> None:
    why = "the main thread was in an optimizer step"
    said = save_all(job(tmp_path, Noted(why=why), Noted(why=why), last_path=lambda: "last.ckpt"))
    assert said == [f"no checkpoint was saved: ranks 0-1: {why}; the last checkpoint is last.ckpt"]
    assert [*tmp_path.iterdir()] == []


class InStep(Noted):
    """A ledger whose main thread is about to end a step."""

    looks = 3

    def __init__(self) -> None:
        super().__init__(why="in the middle of an optimizer step")

    @property
    def is_in_step(self) -> bool:  # type: ignore[override]
        self.looks -= 1
        self.why = self.why if self.looks > 0 else ""
        return bool(self.why)


def test_the_newest_state_is_saved_if_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on SIGTERM in a long batch that ends while the previous state is being written."""

    class GoesOn(Noted):
        def check(self, boundary: Boundary) -> None:
            if boundary is not self.boundary:
                raise NotProvenError("training continued meanwhile")

    ledger = GoesOn(5)

    def contents(trainer: Any, asked: Any, boundary: Boundary, weights: Any) -> dict[str, Any]:
        if boundary.step == 5:
            ledger.boundary = Noted(6).boundary
        return {"step": boundary.step}

    monkeypatch.setattr(saving, "contents", contents)
    said = save_all(job(tmp_path, ledger, Noted(5)))
    (made,) = saved(tmp_path)
    # Where the other rank is after that step is not known.
    assert (made["step"], made[KEY]["positions"]) == (6, {0: {"seed": 6}, 1: None})
    assert len(said) == 1 and said[0].startswith("rank 0 saved the state after step 6 in ")


def test_saving_waits_for_a_step_about_to_end(tmp_path: Path) -> None:
    (line,) = save_all(job(tmp_path, InStep(), Noted()))
    assert "rank 0 saved the state after step 5" in line
    assert saved(tmp_path)[0]["lightning_ncclsafe"]["positions"] == {0: {"seed": 5}, 1: {"seed": 5}}


def test_saving_does_not_wait_for_queued_device_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads from a device, such as a scaler's state, uses its own stream on the device that is trained on."""
    of_thread = threading.local()

    @contextmanager
    def stream(made: str) -> Iterator[None]:
        of_thread.stream = made
        yield
        of_thread.stream = None

    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: f"another of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    seen: list[Any] = []

    class OnDevice(Noted):
        is_on_device = True

        def newest(self) -> Boundary:
            seen.append(("newest", getattr(of_thread, "stream", None)))
            return super().newest()

        def check(self, boundary: Boundary) -> None:
            seen.append(("check", getattr(of_thread, "stream", None)))

    def contents(trainer: Any, ledger: Any, boundary: Boundary, weights: Any) -> dict[str, Any]:
        seen.append(("contents", getattr(of_thread, "stream", None)))
        return {"step": boundary.step}

    monkeypatch.setattr(saving, "contents", contents)
    (rank,) = job(tmp_path, OnDevice())
    rank.saver._trainer.strategy = SimpleNamespace(root_device="cuda:3")
    rank.save()
    assert [one["step"] for one in saved(tmp_path)] == [5]
    assert seen == [(asked, "another of cuda:3") for asked in ("newest", "contents", "check")]


def test_before_the_first_step_nothing_is_reported(tmp_path: Path) -> None:
    assert save_all(job(tmp_path, Noted(why=NO_STEP), Noted(why=NO_STEP))) == []


def test_a_save_that_cannot_finish_in_time_is_not_started(tmp_path: Path) -> None:
    said = save_all(job(tmp_path, Noted(), last_save_s=lambda: 60.0))
    assert said == [
        "rank 0 saved no checkpoint of step 5: the last one took 60 s, and 5 s are left; "
        "this run has no earlier checkpoint"
    ]


def test_unresponsive_storage_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(saving.tensors, "save", lambda value, file: answers.wait(100))
    ranks = job(tmp_path, Noted())
    began = time.monotonic()
    said = save_all(ranks, budget_s=0.5)
    assert time.monotonic() - began < 30.0
    assert said == ["no checkpoint was saved: no time was left; this run has no earlier checkpoint"]
    answers.set()
    assert ranks[0].saver._is_over.wait(10)
    assert [*tmp_path.iterdir()] == []


class Lost(MemoryExchange):
    """An exchange whose host is gone."""

    def _fail(self, *args: Any, **keys: Any) -> Any:
        raise ExchangeError("its host is gone")

    set = set_if_absent = get_many = delete = _fail  # type: ignore[assignment]


def test_without_an_exchange_each_rank_saves_on_its_own(tmp_path: Path) -> None:
    save_all(job(tmp_path, Noted(), Noted(), through=Lost))
    assert [checkpoint["step"] for checkpoint in saved(tmp_path)] == [5, 5]


@pytest.mark.parametrize("folder", ["a file", "read-only", "full", "gone meanwhile"])
def test_an_unwritable_folder_is_reported(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoints"
    good = saved_before(tmp_path / "regular")

    def write(value: Any, file: BinaryIO) -> None:
        file.write(b"half of it")
        if folder == "full":
            raise OSError(28, "No space left on device")
        shutil.rmtree(path)

    if folder == "a file":
        path.write_text("mine")
    elif folder == "read-only":
        path = Path("/proc/checkpoints")
    else:
        good = saved_before(path) if folder == "full" else good
        monkeypatch.setattr(saving.tensors, "save", write)
    (said,) = save_all(job(path, Noted(), last_path=lambda: str(good)))
    assert said.startswith("rank 0 saved no checkpoint of step 5: ") and "Error: " in said and "\n" not in said
    assert said.endswith(f"; the last checkpoint is {good}")
    assert good.read_text() == "good" and {*good.parent.iterdir()} == {good}


def saved_before(folder: Path) -> Path:
    folder.mkdir()
    (folder / "good.ckpt").write_text("good")
    return folder / "good.ckpt"


def test_another_rank_saves_if_the_saver_dies_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written half of the checkpoint when it falls silent."""
    dies, is_over, write = threading.Event(), threading.Event(), saving.tensors.save

    def half(value: Any, file: BinaryIO) -> None:
        if "step" not in value or dies.is_set():
            return write(value, file)
        dies.set()
        file.write(b"half of it")
        file.flush()
        is_over.wait(100)
        raise OSError("it is dead")

    monkeypatch.setattr(saving.tensors, "save", half)
    ranks = job(tmp_path, Noted(), Noted())
    for rank in ranks:
        rank.saver.begin("dead-rank", budget_s=8.0)
    ranks[1].saver.wait()
    (found,) = saved(tmp_path)
    assert found["step"] == 5 and dies.is_set()
    assert ["rank 1 saved the state after step 5" in line for line in ranks[1].said] == [True]
    # The one that is stuck leaves as well, and does not say that nothing was saved.
    began = time.monotonic()
    ranks[0].saver.wait()
    assert time.monotonic() - began < 30.0 and ranks[0].said == []
    is_over.set()
    assert ranks[0].saver._is_over.wait(10)
    assert len([*tmp_path.iterdir()]) == 1


def test_a_stuck_rank_learns_that_any_other_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have tried in vain before, as all ranks of a host whose storage is gone."""
    is_stuck, is_over, write = threading.Event(), threading.Event(), saving.tensors.save

    def first_is_stuck(value: Any, file: BinaryIO) -> None:
        if "step" in value and not is_stuck.is_set():
            is_stuck.set()
            is_over.wait(100)
        write(value, file)

    monkeypatch.setattr(saving.tensors, "save", first_is_stuck)
    broken = [Noted(why_then="storage is gone") for _ in range(8)]
    ranks = job(tmp_path, Noted(), *broken, Noted())
    for rank in ranks:
        rank.saver.begin("dead-rank", budget_s=8.0)
    ranks[9].saver.wait()
    assert "rank 9 saved the state after step 5" in ranks[9].said[0]
    ranks[0].saver.wait()
    assert ranks[0].said == []
    is_over.set()
    assert ranks[0].saver._is_over.wait(10)


def test_concurrent_requests_save_once(tmp_path: Path) -> None:
    (rank,) = job(tmp_path, Noted())
    done: list[Callable[[], None]] = []
    for _ in range(3):
        rank.saver.begin("SIGTERM", budget_s=5.0, finally_do=lambda: done.append(rank.save))
        rank.saver.wait()
    assert len(saved(tmp_path)) == len(done) == 1
    assert not saving.is_saving()
