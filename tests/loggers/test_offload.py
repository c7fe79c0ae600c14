"""One offloaded logger from its start to its end: what comes in, what goes out, and what is said."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from own_threads import join_own_threads
from polling import until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ncclsafe.loggers import offload as offload_module
from lightning_ncclsafe.loggers import starting
from lightning_ncclsafe.loggers.destinations import LocalDestination
from lightning_ncclsafe.loggers.media import MediaProcess
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.loggers.recovery import recover
from lightning_ncclsafe.settings import OffloadSettings

LONG_S = 20.0


class Storage:
    """Stands between the offload and the disk; answers only while ``answers`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        append, replace = LocalDestination.append, LocalDestination.replace

        def waits(method: Any) -> Any:
            def wait(*args: Any) -> Any:
                assert self.answers.wait(LONG_S)
                return method(*args)

            return wait

        monkeypatch.setattr(LocalDestination, "append", waits(append))
        monkeypatch.setattr(LocalDestination, "replace", waits(replace))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage(monkeypatch)
    yield made
    made.answers.set()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(starting, "say_on_stderr", lines.append)
    return lines


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    join_own_threads(within_s=LONG_S)
    assert not list((tmp_path / "staging").glob("*")), "staging"


def settings(folder: Path, **changes: Any) -> OffloadSettings:
    common: dict[str, Any] = {
        "max_points_per_s": None,
        "overflow": "thin",
        "block_s": 0.2,
        "memory_limit_bytes": 64 << 20,
        "disk_limit_bytes": 64 << 20,
        "finalize_s": 10.0,
        "staging_dir": folder / "staging",
    }
    return OffloadSettings(**{**common, **changes})


def start(logger: Logger, folder: Path, **changes: Any) -> Offload:
    _ = logger.experiment  # type: ignore[attr-defined]
    return starting.start_offload(logger, settings(folder, **changes))


def end(logger: Logger, offload: Offload) -> None:
    offload.ending = True
    logger.finalize("success")


def rows(logger: CSVLogger) -> list[str]:
    return Path(logger.log_dir, "metrics.csv").read_text().split()


def events(logger: TensorBoardLogger) -> EventAccumulator:
    found = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_a_forked_child_leaves_everything_to_its_parent(tmp_path: Path, said: list[str]) -> None:
    logger = CSVLogger(str(tmp_path))
    offload = start(logger, tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    child = os.fork()
    if child == 0:
        # What the child of a user's program does: logs, ends its Trainer, and runs exit handlers.
        logger.log_metrics({"a": 9.0}, step=9)
        end(logger, offload)
        offload._at_exit()
        os._exit(0 if not said and not offload.ended.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0
    logger.log_metrics({"a": 2.0}, step=1)
    end(logger, offload)
    assert rows(logger) == ["a,step", "1.0,0", "2.0,1"]
    assert not said, "a success prints nothing"


def test_one_bad_step_loses_no_other(tmp_path: Path, said: list[str]) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path)
    logger.experiment.add_text("text", "hello", 0)
    for step in (1, 2**63, 2):
        logger.log_metrics({"a": float(step)}, step=step)
    end(logger, offload)
    assert [point.step for point in events(logger).Scalars("a")] == [1, 2]
    assert "text/text_summary" in events(logger).Tags()["tensors"]
    assert "log_metrics failed" in said[0]
    assert "wrote 2 points" in said[-1] and ", 1 dropped)" in said[-1]


def test_a_start_that_fails_halfway_leaves_the_logger_unchanged(tmp_path: Path) -> None:
    class Half(Logger):
        got: list[Any] = []  # noqa: RUF012
        experiment = name = version = None

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.got.append(step)

        def log_hyperparams(self, *_: Any) -> None: ...

        @property
        def save(self) -> Any:
            return lambda: None

    logger = Half()  # type: ignore[abstract]
    with pytest.raises(AttributeError):
        start(logger, tmp_path)
    logger.log_metrics({"a": 1.0}, step=3)
    assert logger.got == [3]
    assert "log_metrics" not in vars(logger)


def test_rows_that_cannot_be_saved_at_the_start_stay_with_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path))
    logger.log_metrics({"a": 1.0}, step=0)
    writer = logger.experiment
    there, writer.metrics_file_path = writer.metrics_file_path, str(tmp_path / "gone" / "metrics.csv")
    with pytest.raises(FileNotFoundError):
        start(logger, tmp_path)
    writer.metrics_file_path = there
    logger.save()
    assert rows(logger) == ["a,step", "1.0,0"]


def test_a_dead_storage_does_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    answers = threading.Event()
    append = LocalDestination.append

    def only_two(self: LocalDestination, file: str, data: bytes) -> None:
        assert "/dead" not in self.path or answers.wait(LONG_S)
        append(self, file, data)

    monkeypatch.setattr(LocalDestination, "append", only_two)
    monkeypatch.setattr(LocalDestination, "replace", only_two)
    loggers = {name: CSVLogger(str(tmp_path), name=name) for name in ("dead", "well", "dead too")}
    offloads = [start(logger, tmp_path) for logger in loggers.values()]
    for logger in loggers.values():
        logger.log_metrics({"a": 1.0}, step=0)
    offload_module.drain_all(1.0)
    assert rows(loggers["well"]) == ["a,step", "1.0,0"]
    answers.set()
    for logger, offload in zip(loggers.values(), offloads, strict=True):
        end(logger, offload)


def test_late_media_are_reported_and_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    goes_on = threading.Event()
    make = MediaProcess.make

    def slowly(*args: Any) -> Any:
        assert goes_on.wait(LONG_S)
        return make(*args)

    monkeypatch.setattr(MediaProcess, "make", slowly)
    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path, finalize_s=0.3)
    for step in range(3):
        logger.experiment.add_image("image", torch.rand(3, 128, 128), step)
    end(logger, offload)
    assert "still in memory and are lost when this process ends" in said[-1]
    assert not offload.ended.is_set()
    goes_on.set()
    assert offload.ended.wait(LONG_S)
    assert [image.step for image in events(logger).Images("image")] == [0, 1, 2]


def test_the_next_stage_writes_after_the_rest_of_the_last_one(
    tmp_path: Path, storage: Storage, said: list[str]
) -> None:
    logger = CSVLogger(str(tmp_path))
    first = start(logger, tmp_path, finalize_s=0.3)
    storage.answers.clear()
    for step in range(10):
        logger.log_metrics({"a": 1.0}, step=step)
    end(logger, first)
    assert "recover" in said[-1]
    second = start(logger, tmp_path)
    for step in range(10, 14):
        logger.log_metrics({"a": 1.0}, step=step)
    storage.answers.set()
    end(logger, second)
    assert rows(logger) == ["a,step", *(f"1.0,{step}" for step in range(14))]


def test_an_entry_beyond_the_disk_limit_is_dropped(tmp_path: Path, said: list[str]) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path, overflow="block", disk_limit_bytes=1 << 20)
    logger.experiment.add_image("noise", torch.rand(3, 700, 700), 0)
    logger.experiment.add_image("small", torch.rand(3, 8, 8), 1)
    end(logger, offload)
    assert events(logger).Tags()["images"] == ["small"]
    assert ", 1 dropped)" in said[-1]


def test_media_are_encoded_here_if_their_process_has_not_started_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    never_starts = tmp_path / "python"
    never_starts.write_text("#!/bin/sh\nexec sleep 1000\n")
    never_starts.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(never_starts))

    def encoders() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.name() == "sleep"]

    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path, finalize_s=LONG_S)
    for step in range(2):
        logger.experiment.add_image("image", torch.rand(3, 128, 128), step)
    until(encoders)
    end(logger, offload)
    assert [image.step for image in events(logger).Images("image")] == [0, 1]
    assert not said and not encoders()


def test_a_hung_encoder_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, is_asked = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        is_asked.set()
        assert hangs.wait(5 * LONG_S)
        return []

    monkeypatch.setattr(MediaProcess, "make", hang)
    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path, finalize_s=0.2)
    logger.experiment.add_image("image", torch.rand(3, 128, 128), 0)
    assert is_asked.wait(LONG_S)
    began = time.monotonic()
    end(logger, offload)
    assert time.monotonic() - began < LONG_S
    hangs.set()
    assert offload.ended.wait(LONG_S)


def test_user_events_respect_the_limits(tmp_path: Path, storage: Storage, said: list[str]) -> None:
    from torch.utils.tensorboard.summary import text

    logger = TensorBoardLogger(str(tmp_path))
    offload = start(logger, tmp_path, memory_limit_bytes=1 << 20, disk_limit_bytes=1 << 20, finalize_s=0.2)
    storage.answers.clear()
    for step in range(400):
        logger.experiment._get_file_writer().add_summary(text("t", "x" * 10_000), step)
    logger.log_hyperparams({"lr": 0.1})
    end(logger, offload)
    facts = offload.facts()
    assert facts.memory_bytes + facts.staged_bytes < 3 << 20
    assert facts.dropped > 100
    storage.answers.set()
    assert offload.ended.wait(LONG_S)
    assert "hp_metric" in events(logger).Tags()["scalars"]
    assert b"lr" in b"".join(path.read_bytes() for path in Path(logger.log_dir).glob("events*"))


def test_arguments_of_file_writing_calls_respect_the_limit(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    writer, goes_on, is_begun = logger.experiment, threading.Event(), threading.Event()

    def add_embedding(*_: Any, **__: Any) -> None:
        is_begun.set()
        assert goes_on.wait(LONG_S)

    monkeypatch.setattr(type(writer), "add_embedding", add_embedding)
    offload = start(logger, tmp_path, memory_limit_bytes=1 << 20)
    for _ in range(10):
        writer.add_embedding(torch.zeros(100, 1000))
    assert is_begun.wait(LONG_S)
    assert offload.facts().memory_bytes <= 1 << 20
    assert offload.facts().dropped >= 7
    goes_on.set()
    end(logger, offload)


def test_a_user_writer_keeps_its_methods(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    class Prefixing(SummaryWriter):
        def add_scalar(self, tag: str, *args: Any, **kwargs: Any) -> None:
            super().add_scalar(f"mine/{tag}", *args, **kwargs)

        def add_loss(self, value: float, step: int) -> None:
            self.add_scalar("loss", value, step)

    logger = TensorBoardLogger(str(tmp_path))
    logger._experiment = Prefixing(logger.log_dir)
    offload = start(logger, tmp_path)
    logger.experiment.add_loss(1.0, 0)
    logger.log_metrics({"a": 2.0}, step=1)
    end(logger, offload)
    assert sorted(events(logger).Tags()["scalars"]) == ["mine/a", "mine/loss"]


def test_a_user_writer_of_rows_keeps_its_methods(tmp_path: Path) -> None:
    class Keeping(ExperimentWriter):
        kept: list[Any] = []  # noqa: RUF012

        def log_metrics(self, metrics_dict: Any, step: int | None = None) -> None:
            self.kept.append(step)
            super().log_metrics(metrics_dict, step)

    logger = CSVLogger(str(tmp_path))
    logger._experiment = Keeping(logger.log_dir)
    offload = start(logger, tmp_path)
    logger.log_metrics({"a": 1.0}, step=3)
    end(logger, offload)
    assert Keeping.kept == [3]
    assert rows(logger) == ["a,step", "1.0,3"]


def test_points_of_another_thread_at_the_end_are_not_lost(tmp_path: Path, said: list[str]) -> None:
    logger = CSVLogger(str(tmp_path))
    offload = start(logger, tmp_path)
    accepted, stops, is_logging = [0], threading.Event(), threading.Event()

    def log() -> None:
        while not stops.is_set():
            if "log_metrics" not in vars(logger):
                return
            logger.log_metrics({"a": 1.0}, step=accepted[0])
            accepted[0] += 1
            if accepted[0] == 20:
                is_logging.set()
            stops.wait(0.002)

    thread = threading.Thread(target=log)
    thread.start()
    assert is_logging.wait(LONG_S)
    end(logger, offload)
    stops.set()
    thread.join()
    logger.save()
    # The very last one may have met the logger as it was again.
    assert [int(row.split(",")[1]) for row in rows(logger)[1:]] == list(range(accepted[0]))


def test_staged_data_of_dead_storage_can_be_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    refuses = [True]
    append = LocalDestination.append

    def refuse(self: LocalDestination, file: str, data: bytes) -> None:
        if refuses[0]:
            raise OSError("not today")
        append(self, file, data)

    monkeypatch.setattr(LocalDestination, "append", refuse)
    monkeypatch.setattr(LocalDestination, "replace", refuse)
    logger = CSVLogger(str(tmp_path))
    offload = start(logger, tmp_path, finalize_s=0.3)
    logger.log_metrics({"a": 1.0}, step=0)
    end(logger, offload)
    assert [line.split(":")[0] for line in said[:1]] == [f"CSVLogger cannot write to {logger.log_dir}"]
    assert "ncclsafe logs recover" in said[-1]
    # It is this process's own as long as that tries.
    assert recover(Path(offload.facts().staging)).is_busy
    refuses[0] = False
    assert offload.ended.wait(LONG_S)
    assert rows(logger) == ["a,step", "1.0,0"]
