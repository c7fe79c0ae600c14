"""The callback: what it takes, what two ranks are told by it, and that a fit leaves nothing of it behind."""

import csv
import gzip
import json
import math
import re
import stat
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm import Warm, ranks_of

from lightning_ncclsafe import CollectiveTimer, SafeDDP
from lightning_ncclsafe.callbacks import collective_timer
from lightning_ncclsafe.code.own_work import take_own_work
from lightning_ncclsafe.collectives import results, timer
from lightning_ncclsafe.collectives.timer import AttachedTimer
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.history import LatenessHistory
from lightning_ncclsafe.timing.stragglers import LEAST_STEPS
from lightning_ncclsafe.timing.summary import OpSummary, TimingSummary

SCRIPT = Path(__file__).with_name("timed_fit.py")
HEAT_MAP = "straggler/late_s_by_rank_and_time"


def test_the_defaults() -> None:
    assert CollectiveTimer().settings == TimerSettings()
    assert TimerSettings() == TimerSettings(every_n_steps=50, table=True, trace=True, heat_map=True)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "50"])
def test_an_invalid_every_n_steps_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"every_n_steps={value!r} must be a whole number of at least 1")):
        CollectiveTimer(every_n_steps=value)


def test_a_stock_strategy_is_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=DDPStrategy())
    with pytest.raises(TypeError, match=r"this Trainer has DDPStrategy\. Use .*SafeDDP"):
        CollectiveTimer().setup(trainer, LightningModule(), "fit")


def test_a_safe_strategy_is_accepted() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=SafeDDP(), logger=False)
    CollectiveTimer().setup(trainer, LightningModule(), "fit")


class Attached:
    """A timer of rank 0 that has something to show."""

    def __init__(self) -> None:
        self.ended = 0
        self.trace = ""
        self.steps = LEAST_STEPS
        op = OpSummary(group="0", op="all_reduce", ranks=2, count=1)
        summary = TimingSummary(ops=(op,))
        analysis = SimpleNamespace(summary=lambda: replace(summary, steps=self.steps), history=LatenessHistory(2))
        self.timer = SimpleNamespace(is_off=False, scalars=lambda: {"a": 1.0}, analysis=analysis)

    def end(self) -> None:
        self.ended += 1
        self.trace = "trace: here"


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Attached:
    made = Attached()
    monkeypatch.setattr(collective_timer, "timer_of", lambda strategy: made)
    return made


class Logger:
    def __init__(self) -> None:
        self.metrics: list[tuple[dict[str, float], int]] = []
        self.experiment = None

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((metrics, step))


def trainer_of(logger: Any, *, step: int = 100, rank: int = 0) -> Any:
    return SimpleNamespace(strategy=None, loggers=[logger], global_step=step, is_global_zero=rank == 0)


def batch_ends(callback: CollectiveTimer, trainer: Any) -> None:
    callback.on_train_batch_end(trainer, LightningModule(), None, None, 0)


def test_rank_0_logs_scalars_every_n_steps(attached: Attached) -> None:
    logger, callback = Logger(), CollectiveTimer(every_n_steps=50)
    batch_ends(callback, trainer_of(logger, step=99))
    batch_ends(callback, trainer_of(logger, rank=1))
    assert logger.metrics == []
    batch_ends(callback, trainer_of(logger))
    assert logger.metrics == [({"a": 1.0}, 100)]


def test_a_failure_to_print_results_does_not_end_the_run(
    attached: Attached, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("as the test wants")

    monkeypatch.setattr(collective_timer, "print_table", fail)
    CollectiveTimer().teardown(trainer_of(Logger()), LightningModule(), "fit")
    assert "writing the timings of collectives failed and is off" in capfd.readouterr().err
    assert attached.ended == 1


@pytest.mark.parametrize(("steps", "is_printed"), [(LEAST_STEPS, True), (LEAST_STEPS - 1, False)])
def test_detaching_saves_the_trace_and_prints_it_after_enough_steps(
    steps: int, is_printed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails at its first step, or a learning-rate search, has no timings worth printing."""
    exchange, saved = MemoryExchange(), list[Path]()
    made = AttachedTimer(
        SimpleNamespace(), ActionTracker(), exchange, TimerSettings(), rank=0, world_size=1, report_dir=tmp_path
    )
    summary = TimingSummary(ops=(OpSummary(group="0", op="all_reduce", ranks=1, count=1),), steps=steps)
    monkeypatch.setattr(made.timer.analysis, "summary", lambda: summary)
    monkeypatch.setattr(timer, "save", lambda analysis, summary, folder, _: saved.append(folder) or "trace: here")
    made.detach()
    assert saved == [tmp_path]
    assert ("trace: here" in capfd.readouterr().err) is is_printed


def test_a_disabled_timer_shows_nothing(attached: Attached, capfd: pytest.CaptureFixture[str]) -> None:
    attached.timer.is_off = True
    logger = Logger()
    CollectiveTimer().teardown(trainer_of(logger), LightningModule(), "fit")
    assert logger.metrics == [] and capfd.readouterr().err == "" and attached.ended == 1


def test_a_failing_logger_is_reported_once_and_the_others_continue(
    attached: Attached, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise OSError("no space")

    good, callback = Logger(), CollectiveTimer()
    trainer = trainer_of(good)
    trainer.loggers = [Broken(), good]
    batch_ends(callback, trainer), batch_ends(callback, trainer)
    assert len(good.metrics) == 2
    assert capfd.readouterr().err.count("logging collectives to Broken failed and is off") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_prints(attached: Attached, capfd: pytest.CaptureFixture[str], rank: int) -> None:
    CollectiveTimer().teardown(trainer_of(Logger(), rank=rank), LightningModule(), "fit")
    said = capfd.readouterr().err
    assert said.count("collectives of 50 steps") == said.count("trace: here") == (1 if rank == 0 else 0)
    assert attached.ended == 1, "each rank shares the rest"


@pytest.mark.parametrize(("stage", "steps"), [("validate", 900), ("test", 900), ("predict", 900), ("fit", 49)])
def test_only_a_long_enough_fit_prints(
    attached: Attached, capfd: pytest.CaptureFixture[str], stage: str, steps: int
) -> None:
    attached.steps, logger = steps, Logger()
    CollectiveTimer().teardown(trainer_of(logger), LightningModule(), stage)
    assert capfd.readouterr().err == ""
    assert attached.ended == 1 and logger.metrics, "loggers still get their scalars"


def test_logging_scalars_counts_as_own_work(attached: Attached) -> None:
    class Slow(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            time.sleep(0.001)

    take_own_work()
    batch_ends(CollectiveTimer(), trainer_of(Slow()))
    assert sum(end_ns - begin_ns for begin_ns, end_ns in take_own_work()) >= 1e6


def test_disabled_outputs_are_not_printed(attached: Attached, capfd: pytest.CaptureFixture[str]) -> None:
    CollectiveTimer(table=False, trace=False, heat_map=False).teardown(trainer_of(Logger()), LightningModule(), "fit")
    assert capfd.readouterr().err == ""


NOTHING_TIMED: Any = SimpleNamespace(calls=SimpleNamespace(blocks=[]), spans=SimpleNamespace(all=lambda: []))


def test_a_failed_write_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "collectives").write_text("a file in the way")
    assert results.save(NOTHING_TIMED, TimingSummary(), tmp_path, TimerSettings()) == ""
    said = capfd.readouterr().err
    assert said.startswith(f"[ncclsafe] the timings of collectives could not be written to {tmp_path}/collectives: ")
    assert said.count("\n") == 1


def test_each_call_writes_its_table_to_a_new_file(tmp_path: Path) -> None:
    settings = TimerSettings(trace=False)
    for steps in (0, 3):
        assert results.save(NOTHING_TIMED, TimingSummary(steps=steps), tmp_path, settings) == ""
    tables = sorted((tmp_path / "collectives").iterdir())
    assert [path.name.partition("Z")[2].lstrip("-1") for path in tables] == ["collectives.txt"] * 2
    assert {path.read_text().splitlines()[0] for path in tables} == {
        "collectives of 0 steps",
        "collectives of 3 steps",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in tables} == {0o600}


def test_disabled_outputs_are_not_written(tmp_path: Path) -> None:
    assert results.save(NOTHING_TIMED, TimingSummary(), tmp_path, TimerSettings(trace=False, table=False)) == ""
    assert [*tmp_path.iterdir()] == []


def test_the_heat_map_goes_to_loggers_that_accept_images() -> None:
    seen: list[tuple[Any, ...]] = []
    board = SimpleNamespace(experiment=SimpleNamespace(add_image=lambda *told, **more: seen.append((*told, more))))
    wandb = SimpleNamespace(log_image=lambda *told, **more: seen.append((*told, more)))
    history = LatenessHistory(2)
    results.log_heat_map(history, [board, wandb, SimpleNamespace()], 7)
    assert seen == [], "nothing was compared, so nothing was late"
    history._used = 3
    results.log_heat_map(history, [board, wandb, SimpleNamespace()], 7)
    (name, picture, step, how), (key, images, more) = seen
    assert (name, step, how) == (HEAT_MAP, 7, {"dataformats": "HWC"})
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    assert key == HEAT_MAP and len(images) == 1 and more == {"step": 7}


@pytest.fixture(scope="module")
def fitted(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """The folder, what was said, and what each of two ranks has seen."""
    folder = tmp_path_factory.mktemp("timed")
    codes, output = warm.run([str(SCRIPT), str(folder)], folder, timeout_s=55, envs=ranks_of(2))
    assert codes == [0, 0], output
    said = [line.removeprefix("[ncclsafe] ") for line in output.splitlines() if line.startswith("[ncclsafe]")]
    return folder, said, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


Fitted = tuple[Path, list[str], list[dict[str, Any]]]


def test_scalars_reach_the_loggers(fitted: Fitted) -> None:
    folder, _, _ = fitted
    with open(folder / "csv/version_0/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("straggler/rank")]
    assert rows
    # Now and then another program makes rank 0 later than that.
    assert statistics.mode(float(row["straggler/rank"]) for row in rows) == 1.0
    assert all(math.isfinite(float(row["collectives/all_reduce/skew_ms"])) for row in rows)
    # A linear layer of four weights and a bias. The first window, the only one where sharing is slow, has the length of
    # Lightning's loader as well: one reduction of eight bytes among more than a hundred.
    assert min(abs(float(row["collectives/all_reduce/size_bytes"]) - 20) for row in rows) < 0.2
    events = EventAccumulator(str(folder / "tb/version_0")).Reload()
    assert {"straggler/rank", "straggler/late_ms_per_step", "collectives/all_reduce/skew_ms"} <= {
        *events.Tags()["scalars"]
    }


def test_the_heat_map_is_logged_once(fitted: Fitted) -> None:
    folder, _, _ = fitted
    (image,) = EventAccumulator(str(folder / "tb/version_0")).Reload().Images(HEAT_MAP)
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_the_table_is_printed_once_and_names_the_straggler(fitted: Fitted) -> None:
    _, said, _ = fitted
    assert len([line for line in said if line.startswith("collectives of ")]) == 1
    # On a busy machine the other one may be late as well.
    (told,) = [line for line in said if line.startswith("rank 1 was last in")]
    assert "in data loading" in told
    assert any(line.startswith("Rank 1 was last in") for line in said), "in the table"
    assert len([line for line in said if line.startswith("trace: ")]) == 1


def test_the_trace_is_private_and_readable(fitted: Fitted) -> None:
    folder, _, _ = fitted
    table, path = sorted((folder / "reports/collectives").iterdir())
    assert path.name.endswith("Z-trace.json.gz") and table.name == path.name.replace("trace.json.gz", "collectives.txt")
    assert table.read_text().startswith("collectives of ") and stat.S_IMODE(table.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) > 500


@pytest.mark.parametrize("rank", [0, 1])
def test_everything_is_restored_after_the_fit(fitted: Fitted, rank: int) -> None:
    _, _, seen = fitted
    found = seen[rank]
    assert found["steps"] == 240
    assert found["threads_before"] == found["threads_after"] == []
    assert "ncclsafe-timer" in found["threads_meanwhile"]
    assert found["names_meanwhile"] == found["new_names"] == []
    assert found["log_metrics_meanwhile"] == "WrappedMethod"
    assert found["log_metrics_after"] == "method"
    assert "log_metrics" not in found["attributes_after"]
    assert not {"start", "stop", "profile"} & {*found["profiler_after"]}
    assert found["timer_after"] is False
