"""The same program with loggers as they are and offloaded: what it can read from them is the same at every moment."""

import csv as csv_files
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock, Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from logged import Model, check_given_back, events, fit, make_trainer, offload

HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown", "on_exception"),
)
Read = Callable[[L.Trainer], Any]


class Reader(L.Callback):
    """Reads the loggers in every hook."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.seen: list[tuple[str, Any]] = []


def _hook(name: str) -> Callable[..., None]:
    def look(self: Reader, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.seen.append((name, self.read(trainer)))

    return look


for _name in HOOKS:
    setattr(Reader, _name, _hook(_name))


class ReadingModel(Model):
    """Reads the loggers where a LightningModule can."""

    def __init__(self, read: Read, fails_at: int = -1) -> None:
        super().__init__()
        self.read = read
        self.seen: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def look(self, hook: str) -> None:
        self.seen.append((hook, self.read(self.trainer)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.look("training_step")
        if self.trainer.global_step == self.fails_at:
            raise RuntimeError("a bug of the user's")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("batch_end")
        self.log("by hook", 1.0)

    def on_train_epoch_end(self) -> None:
        self.look("epoch_end")
        self.log("of the epoch", 2.0)

    def on_validation_epoch_end(self) -> None:
        self.look("validation_epoch_end")

    def on_train_end(self) -> None:
        self.look("train_end")


def compare(folder: Path, make_loggers: Callable[[Path], Any], read: Read, fails_at: int = -1, **options: Any) -> int:
    """Trains with both; returns how often something was read."""
    seen = []
    for name in ("stock", "offloaded"):
        torch.manual_seed(7)
        loggers = make_loggers(folder / name)
        before, after, model = Reader(read), Reader(read), ReadingModel(read, fails_at)
        # The first and the last to be called.
        callbacks = [before, *([offload(folder)] if name == "offloaded" else []), after]
        options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1, **options}
        trainer = make_trainer(loggers, *callbacks, **options)
        if fails_at < 0:
            trainer.fit(model)
        else:
            with pytest.raises(RuntimeError, match="a bug of the user's"):
                trainer.fit(model)
        seen.append([*before.seen, *after.seen, *model.seen, ("after", read(trainer))])
        check_given_back(folder, *trainer.loggers)
    differing = [(one, other) for one, other in zip(*seen, strict=True) if repr(one) != repr(other)]
    assert not differing, differing[:5]
    return sum(bool(found) for _, found in seen[1])


class Points(Logger):
    """Keeps its points in memory, and in a list that it was given."""

    name = "points"
    version = 0

    def __init__(self, outside: list[Any]) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}
        self.outside = outside
        self.statuses: list[str] = []
        self.hparams: dict[str, Any] = {}
        self.saves = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.update(metrics)
        self.outside.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams = dict(params)

    def save(self) -> None:
        self.saves += 1

    def finalize(self, status: str) -> None:
        self.statuses.append(status)


def of_points(trainer: L.Trainer) -> Any:
    (logger,) = trainer.loggers
    assert isinstance(logger, Points)
    measured = {**trainer.logged_metrics, **trainer.callback_metrics}
    kept = [dict(logger.logged), list(logger.outside), logger.saves, list(logger.statuses), logger.hparams]
    return [*kept, sorted((key, float(value)) for key, value in measured.items())]


@pytest.mark.parametrize("fails_at", [-1, 5])
def test_a_logger_that_keeps_points_has_them_when_read(tmp_path: Path, fails_at: int) -> None:
    assert compare(tmp_path, lambda folder: Points([]), of_points, fails_at) > 50


class KeepingCSV(CSVLogger):
    """Keeps what it is given beside its file."""

    @property
    def kept(self) -> list[Any]:
        return vars(self).setdefault("_kept", [])  # type: ignore[no-any-return]

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.kept.append((step, dict(metrics), list(self.experiment.metrics)))

    @rank_zero_only
    def save(self) -> None:
        super().save()
        self.kept.append("saved")


def files(folder: Path) -> tuple[Logger, ...]:
    return (
        KeepingCSV(folder, name="csv", version=0, flush_logs_every_n_steps=3),
        TensorBoardLogger(folder, name="tensorboard", version=0),
    )


def of_files(trainer: L.Trainer) -> Any:
    table, board = trainer.loggers
    assert isinstance(table, KeepingCSV)
    assert isinstance(board, TensorBoardLogger)
    file = Path(table.log_dir, "metrics.csv")
    rows = list(csv_files.DictReader(file.open(newline=""))) if file.exists() else []
    tags: dict[str, Any] = {}
    for run in events(Path(board.log_dir)).values():
        tags = {tag: [(one.step, one.value) for one in run.Scalars(tag)] for tag in run.Tags()["scalars"]}
    names = sorted(path.name.partition("tfevents")[0] for one in (table, board) for path in Path(one.log_dir).iterdir())
    writer: Any = table.experiment
    return [rows, tags, names, list(table.kept), list(writer.metrics), list(writer.metrics_keys)] if rows else []


@pytest.mark.parametrize("fails_at", [-1, 5])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_files_are_up_to_date_when_read(tmp_path: Path, fails_at: int) -> None:
    assert compare(tmp_path, files, of_files, fails_at) > 40


def test_files_exist_at_the_same_hooks_as_in_stock(tmp_path: Path) -> None:
    # With Lightning 2.5 hyperparameters have their file some hooks earlier than with stock.
    names = ("metrics.csv", "hparams.yaml") if L.__version__ >= "2.6" else ("metrics.csv",)

    def exist(trainer: L.Trainer) -> list[str]:
        folders = [str(one.log_dir) for one in trainer.loggers]
        paths = [Path(folder, name) for folder in folders for name in names]
        return [str(path.name) for path in paths if path.exists()]

    assert compare(tmp_path, files, exist) > 30


@pytest.mark.filterwarnings("ignore:MLFlow only allows:RuntimeWarning")
def test_mlflow_queries_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)

    def history(trainer: L.Trainer) -> Any:
        logger: Any = trainer.logger
        metrics = logger.experiment.get_run(logger.run_id).data.metrics
        steps = [one.step for one in logger.experiment.get_metric_history(logger.run_id, "number")] if metrics else []
        return [metrics, steps] if metrics else []

    assert compare(tmp_path, lambda folder: MLFlowLogger("experiment", tracking_uri=f"file:{folder}"), history) > 30


@pytest.mark.parametrize(
    "make", [Mock, MagicMock, lambda: Mock(spec=Logger), lambda: MagicMock(spec=CSVLogger)], ids=range(4)
)
def test_a_mock_logger_sees_the_same_calls(tmp_path: Path, make: Callable[[], Any]) -> None:
    def make_logger(folder: Path) -> Any:
        logger = make()
        logger.configure_mock(save_dir="nowhere", name="mock", version=0, log_dir="nowhere", root_dir="nowhere")
        return [logger]

    def calls(trainer: L.Trainer) -> list[str]:
        (logger,) = trainer.loggers
        assert isinstance(logger.log_metrics, Mock)
        # Models are given, too.
        return [str(call) for call in logger.method_calls if "log_graph" not in str(call)]

    assert compare(tmp_path, make_logger, calls) > 30


@pytest.mark.parametrize("method", ["log_metrics", "save", "log_hyperparams", "finalize"])
@pytest.mark.parametrize("make_logger", [TensorBoardLogger, CSVLogger])
def test_a_mocked_method_sees_the_same_calls(tmp_path: Path, make_logger: Any, method: str) -> None:
    with mock.patch.object(make_logger, method) as mocked:

        def calls(trainer: L.Trainer) -> list[str]:
            return [str(call) for call in mocked.mock_calls]

        def make(folder: Path) -> Any:
            mocked.reset_mock()
            return make_logger(folder, name="run", version=0)

        assert compare(tmp_path, make, calls, max_epochs=1) > (0 if method == "finalize" else 10)


class SlowPoints(Points):
    """Writes to somewhere that answers late."""

    def __init__(self, answers: threading.Event) -> None:
        super().__init__([])
        self.answers = answers
        self.threads: list[str] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) <= 3:
            # Nobody knows of a logger that it is slow before it was.
            time.sleep(0.1)
        assert self.answers.wait(20)
        super().log_metrics(metrics, step)


def test_a_slow_logger_of_any_class_delays_nothing(tmp_path: Path) -> None:
    answers = threading.Event()
    answers.set()
    logger = SlowPoints(answers)
    seen: dict[str, int] = {}

    class Looking(L.Callback):
        """Comes before the offload in the list."""

        def look(self, hook: str) -> None:
            seen[hook] = len(logger.outside)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                answers.clear()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 7:
                self.look("batch_end")
                # Not before: training has gone on while the logger did not answer.
                answers.set()

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.look("epoch_end")

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.look("train_end")

    trainer = fit(logger, None, Looking(), offload(tmp_path), max_epochs=2)
    assert seen.pop("batch_end") <= 5
    assert seen == {"epoch_end": 8, "train_end": 8}
    assert [step for step, _ in logger.outside] == list(range(8))
    assert [name.partition("-")[0] for name in logger.threads] == ["MainThread"] * 3 + ["ncclsafe"] * 5
    assert logger.statuses == ["success"]
    assert isinstance(trainer.callbacks[1], Looking)
    check_given_back(tmp_path, logger)


@pytest.fixture
def sigterm_handler() -> Iterator[None]:
    """Put back: a Trainer without a teardown leaves its own, and the processes of later tests would inherit it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_handler")
def test_a_run_after_one_without_teardown_logs_everything_once(tmp_path: Path) -> None:
    class Broken(L.Callback):
        def on_exception(self, *_: Any) -> None:
            raise RuntimeError("this, too")

    def fail(model: Model) -> None:
        if not model.trainer.fit_loop.epoch_progress.current.completed and not failed:
            failed.append(True)
            raise ValueError("the batch is broken")

    rows = []
    for name in ("stock", "offloaded"):
        failed: list[bool] = []
        logger = CSVLogger(tmp_path / name, name="run", version=0)
        callbacks = [Broken(), *([offload(tmp_path)] if name == "offloaded" else [])]
        trainer = make_trainer(logger, *callbacks)
        model = Model({2: fail})
        with pytest.raises(RuntimeError, match="this, too"):
            trainer.fit(model)
        trainer.fit(model)
        check_given_back(tmp_path, logger)
        rows.append(Path(logger.log_dir, "metrics.csv").read_text())
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) > 4


def test_a_successful_run_prints_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_ncclsafe import LoggerOffload

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    fit([*files(tmp_path / "logs"), Points([])], {1: lambda model: model.log("more", 1.0)}, LoggerOffload())
    assert "ncclsafe" not in capfd.readouterr().err
    assert list((tmp_path / "temporary").iterdir()) == []
