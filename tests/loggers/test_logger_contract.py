"""The same calls of a logger as it is and offloaded: what is stored by them is the same, and so is the logger."""

import copy
import math
import os
import pickle
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.utils.tensorboard.writer as torch_writer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from logged import (
    STALL,
    STEPS,
    Model,
    check_given_back,
    counted,
    events,
    fit,
    make_trainer,
    offload,
    points,
    scalars,
    stored,
    wandb_rows,
)
from own_threads import own_threads
from polling import until
from torch.utils.tensorboard.summary import scalar

from lightning_ncclsafe import LoggerOffload
from lightning_ncclsafe.loggers import starting, tensorboard_backend
from lightning_ncclsafe.loggers.csv_backend import CSVBackend
from lightning_ncclsafe.loggers.media import MediaProcess
from lightning_ncclsafe.loggers.starting import writes_on_this_rank


def fit_both(folder: Path, make_logger: Callable[[Path], Logger], *deeds: Any, **options: Any) -> tuple[Path, Path]:
    """The folders of a logger as it is and of one that was offloaded; the same was done with both."""
    torch.manual_seed(3)
    for name, callbacks in (("stock", []), ("offloaded", [offload(folder)])):
        logger = make_logger(folder / name)
        fit(logger, *deeds, *callbacks, **options) if deeds else fit(logger, None, *callbacks, **options)
        check_given_back(folder, logger)
    return folder / "stock", folder / "offloaded"


def call_everything(model: Model) -> None:
    """Every method of a SummaryWriter, and the ways to write that TensorBoardLogger has beside."""
    writer: Any = model.logger.experiment
    ramp = torch.arange(3 * 8 * 8).reshape(3, 8, 8)
    call_small(writer)
    writer.add_histogram("histogram", ramp.float(), 1)
    writer.add_histogram("bins", np.linspace(-1, 1, 50), 1, bins="auto", max_bins=5)
    writer.add_histogram_raw("raw", 0.0, 2.0, 3, 3.0, 5.0, [1.0, 2.0], [1, 2], 1)
    writer.add_image("float", ramp / 192, 1)
    writer.add_image("bytes", ramp.to(torch.uint8).permute(1, 2, 0).numpy(), 1, dataformats="HWC")
    writer.add_images("batch", ramp.expand(2, 3, 8, 8) / 192, 1)
    writer.add_image_with_boxes("boxes", ramp / 192, torch.tensor([[1, 1, 5, 5]]), 1, labels=["thing"])
    writer.add_figure("figure", FakeFigure(), 1)
    writer.add_figure("figures", [FakeFigure(), FakeFigure()], 1)
    writer.add_audio("audio", torch.linspace(-1, 1, 50)[None], 1, sample_rate=100)
    writer.add_mesh("mesh", torch.ones(1, 4, 3), colors=torch.ones(1, 4, 3, dtype=torch.int), global_step=1)
    writer.add_pr_curve("curve", torch.tensor([0, 1, 1]), torch.tensor([0.1, 0.6, 0.9]), 1, num_thresholds=5)
    writer.add_pr_curve_raw("curve_raw", *([1, 2] for _ in range(6)), global_step=1, num_thresholds=2)
    writer.add_tensor("tensor", ramp[0], 1)
    writer.add_embedding(torch.eye(4), ["a", "b", "c", "d"], torch.ones(4, 3, 2, 2), 1, "embedding")
    writer.add_graph(model.layer, torch.ones(1, 3))
    for number in range(5):
        writer.add_image("many", ramp / 192 * number / 5, number)
        writer.add_scalar("many", number, number)


def call_small(writer: Any) -> None:
    writer.add_scalar("scalar", torch.tensor(0.1), 1)
    writer.add_scalar("scalar", np.float32(0.2), np.int64(2))
    writer.add_scalar("new", 0.3, 1, new_style=True)
    writer.add_scalar("double", 0.1 + 1e-9, 1, new_style=True, double_precision=True)
    writer.add_scalar("no_step", 0.4)
    writer.add_scalars("group/of", {"a": 1.0, "b": torch.tensor(2.0)}, 1)
    writer.add_scalars("group/of", {"a": 1.5}, 2)
    writer.add_text("text", "some *text*", 1)
    writer.add_hparams({"lr": 0.1, "name": "x", "on": True}, {"score": 0.5}, run_name="trial", global_step=3)
    writer.add_hparams({"lr": 0.2}, {"score": 0.6}, {"lr": [0.1, 0.2]})
    writer.add_custom_scalars({"all": {"both": ["Multiline", ["scalar", "new"]]}})
    writer.add_custom_scalars_multilinechart(["scalar"], "category", "title")
    writer.add_custom_scalars_marginchart(["a", "b", "c"], "category", "title")
    writer._get_file_writer().add_summary(scalar("by_file", 0.5), 1)
    writer.file_writer.add_summary(scalar("by_file", 0.6), 2)


def log_everything(model: Model) -> None:
    """What a TensorBoardLogger itself is given."""
    logger: Any = model.logger
    logger.log_metrics({"tensor": torch.tensor(0.1), "number": np.float32(0.2), "yes": True, "array": np.ones(1)}, 1)
    logger.log_metrics(metrics={"nothing": math.nan, "endless": math.inf, "text": "0.25"})
    logger.log_metrics({"tree": {"left": 1.0, "right": 2.0}}, step=2)
    logger.log_hyperparams({"lr": 0.5, "nested": {"deep": [1, 2]}}, {"score": 0.5})
    logger.log_hyperparams({"later": (1, 2)})
    logger.log_graph(model)


class FakeFigure:
    """Stands for one of Matplotlib's, which is not installed."""


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def image(figures: Any, close: bool = True) -> Any:
        one = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
        return np.stack([one for _ in figures]) if isinstance(figures, list) else one

    for module in (torch_writer, tensorboard_backend):
        monkeypatch.setattr(module, "figure_to_image", image)


def tensorboard(folder: Path, **options: Any) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="run", version=0, **options)


@pytest.mark.usefixtures("figures")
def test_tensorboard_stores_every_experiment_call_like_stock(tmp_path: Path) -> None:
    stock, offloaded = fit_both(tmp_path, tensorboard, {1: call_everything})
    expected, found = stored(stock), stored(offloaded)
    assert list(found) == list(expected)
    for run, kinds in expected.items():
        assert list(map(str, sorted(found[run], key=str))) == list(map(str, sorted(kinds, key=str)))
        for kind, value in kinds.items():
            assert found[run][kind] == value, (run, kind)
    files = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if is_no_event_file(path)}
        for folder in (stock, offloaded)
    ]
    assert files[0] == files[1]
    assert {path.name for path in files[0]} == {
        "hparams.yaml",
        "metadata.tsv",
        "tensors.tsv",
        "sprite.png",
        "projector_config.pbtxt",
    }


def is_no_event_file(path: Path) -> bool:
    return path.is_file() and "tfevents" not in path.name


def test_tensorboard_stores_every_logger_call_like_stock(tmp_path: Path) -> None:
    stock, offloaded = fit_both(tmp_path, lambda folder: tensorboard(folder, log_graph=True), {1: log_everything})
    expected, found = stored(stock), stored(offloaded)
    assert expected.keys() == found.keys()
    for run in expected:
        # NaN is not equal to itself.
        assert repr(sorted(expected[run].items(), key=repr)) == repr(sorted(found[run].items(), key=repr))
    yaml = "run/version_0/hparams.yaml"
    assert (stock / yaml).read_bytes() == (offloaded / yaml).read_bytes()


@pytest.mark.timeout(120)
def test_large_media_encoded_by_another_process_match_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = MediaProcess.make

    def make_and_note(process: MediaProcess, name: str, *args: Any) -> list[tuple[str, bytes]]:
        events = make(process, name, *args)
        made.append(name)
        return events

    def log_large(model: Model) -> None:
        values = torch.linspace(0, 1, 3 * 160 * 160)
        model.logger.experiment.add_image("image", values.reshape(3, 160, 160), 1)
        model.logger.experiment.add_histogram("histogram", values.to(torch.bfloat16), 1)

    def wait_for_process(model: Model) -> None:
        """Before the end, which would not wait until it has imported torch."""
        if own_threads():
            until(lambda: len(made) == 2, within_s=100)

    monkeypatch.setattr(MediaProcess, "make", make_and_note)
    stock, offloaded = fit_both(tmp_path, tensorboard, {1: log_large, 2: wait_for_process})
    assert stored(offloaded) == stored(stock)
    assert made == ["add_image", "add_histogram"]


def test_every_point_has_the_time_of_its_call(tmp_path: Path) -> None:
    between: dict[str, tuple[float, float]] = {}

    def log_timed(model: Model) -> None:
        writer = model.logger.experiment
        calls: dict[str, Callable[[], Any]] = {
            "scalar": lambda: writer.add_scalar("scalar", 1.0, 1),
            "group": lambda: writer.add_scalars("group", {"a": 1.0}, 1),
            "image": lambda: writer.add_image("image", torch.zeros(1, 4, 4), 1),
            "text/text_summary": lambda: writer.add_text("text", "text", 1),
            "metric": lambda: model.logger.log_metrics({"metric": 1.0}, 1),
        }
        for tag, call in calls.items():
            began = time.time()
            call()
            between[tag] = began, time.time()

    logger = tensorboard(tmp_path)
    fit(logger, dict.fromkeys(range(STEPS), log_timed), offload(tmp_path))
    runs = events(tmp_path).values()
    last = {tag: these[-1].wall_time for run in runs for (_, tag), these in points(run).items()}
    for tag, (began, ended) in between.items():
        assert began <= last[tag] <= ended, tag
    for these in (these for run in runs for these in points(run).values()):
        times = [event.wall_time for event in these]
        assert times == sorted(times)


def test_arguments_changed_after_a_call_are_stored_unchanged(tmp_path: Path) -> None:
    def log_and_change(model: Model) -> None:
        logger: Any = model.logger
        writer = logger.experiment
        image, value, array = torch.zeros(1, 4, 4), torch.tensor(1.0), np.full(3, 1.0)
        mapping = OrderedDict(a=torch.tensor(1.0))
        hparams = {"lr": 1.0}
        writer.add_image("image", image, 1)
        writer.add_scalar("scalar", value, 1)
        writer.add_histogram("histogram", array, 1)
        writer.add_scalars("scalars", mapping, 1)
        writer.add_hparams(hparams, {"score": value}, run_name="trial")
        writer.add_embedding(image[0], tag="embedding")
        logger.log_metrics({"metric": value}, 1)
        logger.log_hyperparams(hparams)
        for changed in (image, value, array, mapping["a"]):
            changed += 1
        hparams["lr"] = mapping["b"] = 2.0

    stock, offloaded = fit_both(tmp_path, tensorboard, {1: log_and_change})
    assert stored(offloaded) == stored(stock)
    (embedding,) = offloaded.rglob("tensors.tsv")
    assert "1.0" not in embedding.read_text()


@pytest.mark.parametrize("value", ["text", None, [1.0, 2.0], np.ones(2), object()], ids=type)
def test_a_metric_refused_by_tensorboard_raises_as_in_stock(tmp_path: Path, value: Any) -> None:
    raised: list[str] = []

    def log_wrong(model: Model) -> None:
        with pytest.raises(Exception) as caught:
            model.logger.log_metrics({"before": 1.0, "wrong": value, "behind": 2.0}, 1)
        raised.append(f"{caught.type} {caught.value}")

    stock, offloaded = fit_both(tmp_path, tensorboard, {1: log_wrong})
    assert raised[0].partition(" at 0x")[0] == raised[1].partition(" at 0x")[0]
    assert stored(offloaded) == stored(stock)
    assert scalars(offloaded, "before") == [(1, 1.0)]


def test_a_wrong_experiment_call_is_reported_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call_wrongly(model: Model) -> None:
        writer = model.logger.experiment
        writer.add_image("wrong", torch.zeros(7, 4), 1)
        writer.add_hparams(["no dict"], {})
        writer.add_embedding(torch.zeros(2, 2), metadata=["only one"])
        writer.add_hparams({"lr": 0.1}, {"score": 1.0}, run_name="fine")

    fit(tensorboard(tmp_path), {1: call_wrongly, 2: call_wrongly}, offload(tmp_path, finalize_timeout=5.0))
    said = capsys.readouterr().err
    left_out = sorted(line.partition("TensorBoardLogger: ")[2] for line in said.splitlines() if "it is skipped" in line)
    assert [line.partition("(")[0] for line in left_out] == [
        "add_embedding failed: AssertionError",
        "add_hparams failed: TypeError",
        "add_image failed: AssertionError",
    ]
    assert counted(said)["dropped"] == 6
    found = stored(tmp_path)
    assert [step for step, _ in found["run/version_0"]["scalars", "number"]] == list(range(STEPS))
    assert "run/version_0/fine" in found


def test_hyperparameters_with_a_run_name_go_to_that_run(tmp_path: Path) -> None:
    # An absolute name of a run is what people use who want no folder below.
    def add(model: Model) -> None:
        model.logger.experiment.add_hparams({"lr": 0.1}, {"score": 1.0}, run_name=str(tmp_path / "elsewhere"))

    fit(tensorboard(tmp_path), {1: add}, offload(tmp_path))
    assert sorted(stored(tmp_path)) == ["elsewhere", "run/version_0"]


def log_rows(model: Model) -> None:
    """What makes a CSVLogger's file: new columns, other types, rows without a step."""
    logger: Any = model.logger
    logger.log_metrics({"single": np.float32(0.1), "double": np.float64(0.1), "third": 1 / 3}, 7)
    logger.log_metrics({"tensor": torch.tensor(0.1), "yes": True, "nothing": math.nan, "none": None}, 8)
    logger.log_metrics({"a new column": 1})
    logger.log_metrics({"text": 'some, "text"\nof two lines', "number": 1e-20})
    logger.log_metrics({"list": [1, (2, 3)], "step": 99}, 9)
    logger.log_metrics({"only text": "x"}, step=None)
    logger.log_metrics({}, 10)
    logger.experiment.log_metrics({"directly": torch.tensor(1.5), "big": 2**70})
    logger.experiment.log_metrics({"directly": 2.5}, 3)
    logger.log_hyperparams({"later": {"deep": (1, 2)}})
    logger.save()


def csv(folder: Path, **options: Any) -> CSVLogger:
    return CSVLogger(folder, name="run", version=0, **options)


def test_csv_files_match_stock_byte_for_byte(tmp_path: Path) -> None:
    stock, offloaded = fit_both(tmp_path, csv, {1: log_rows, 3: log_rows})
    for name in ("metrics.csv", "hparams.yaml"):
        path = Path("run/version_0") / name
        assert (offloaded / path).read_bytes() == (stock / path).read_bytes()
    assert len((stock / "run/version_0/metrics.csv").read_text().splitlines()) > STEPS + 18


@pytest.mark.parametrize("make_logger", [csv, tensorboard])
def test_a_callback_sent_to_a_spawned_rank_offloads(tmp_path: Path, make_logger: Callable[[Path], Any]) -> None:
    """Pickled together with the logger, as a launcher does that spawns."""
    seen: list[bool] = []

    def look(model: Model) -> None:
        seen.append(any(thread.name.startswith("ncclsafe-stage-") for thread in threading.enumerate()))

    logger, callback = pickle.loads(pickle.dumps((make_logger(tmp_path / "logs"), offload(tmp_path))))
    fit(logger, {1: look}, callback)
    assert seen == [True]
    if make_logger is csv:
        assert len((tmp_path / "logs/run/version_0/metrics.csv").read_text().splitlines()) > STEPS
    else:
        assert stored(tmp_path / "logs")


@pytest.mark.parametrize("make_logger", [csv, tensorboard])
def test_points_logged_before_and_after_a_fit_are_kept(tmp_path: Path, make_logger: Callable[[Path], Any]) -> None:
    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        logger = make_logger(tmp_path / name)
        logger.log_metrics({"before": 1.0, "number": 9.0}, 1)
        fit(logger, None, *callbacks)
        logger.log_metrics({"after": 2.0}, 20)
        logger.log_metrics({"number": 3.0}, 21)
        logger.save()
        logger.finalize("success")
    stock, offloaded = (tmp_path / name / "run" / "version_0" for name in ("stock", "offloaded"))
    if make_logger is csv:
        assert (offloaded / "metrics.csv").read_bytes() == (stock / "metrics.csv").read_bytes()
    else:
        assert stored(offloaded) == stored(stock)
        assert scalars(offloaded, "after") == [(20, 2.0)]


class OwnTensorBoard(TensorBoardLogger):
    """Logs something beside, calls itself, and writes a file of its own."""

    saves = 0

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> str:
        super().log_metrics({f"own/{tag}": value for tag, value in metrics.items()}, step)
        if "nested" not in metrics:
            self.log_metrics({"nested": 1.0}, step)
        super().log_metrics({f"own/{tag}": value + 1 for tag, value in metrics.items()}, step)
        self.experiment.add_text("said", str(sorted(metrics)), step)
        return "logged"

    @rank_zero_only
    def save(self) -> None:
        super().save()
        self.saves += 1
        Path(self.log_dir, "own.txt").write_text("saved")


def test_a_tensorboard_subclass_keeps_its_methods(tmp_path: Path) -> None:
    answers = []

    def log(model: Model) -> None:
        answers.append(model.logger.log_metrics({"direct": 1.0}, 1))
        assert isinstance(model.logger, OwnTensorBoard)

    loggers: list[OwnTensorBoard] = []

    def make(folder: Path) -> OwnTensorBoard:
        loggers.append(OwnTensorBoard(folder, name="run", version=0))
        return loggers[-1]

    stock, offloaded = fit_both(tmp_path, make, {1: log})
    assert stored(offloaded) == stored(stock)
    assert scalars(offloaded / "run", "own/number") == [
        (step, value) for step in range(STEPS) for value in (step, step + 1)
    ]
    assert answers == ["logged"] * 2
    assert (offloaded / "run/version_0/own.txt").read_text() == "saved"
    assert (offloaded / "run/version_0/hparams.yaml").read_bytes() == (
        stock / "run/version_0/hparams.yaml"
    ).read_bytes()
    assert loggers[0].saves == loggers[1].saves > 0


class Recorder(Logger):
    """Writes down what it is called with; its methods know more arguments than Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.experiment = object()

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None, *, group: str = "") -> None:
        self.calls.append(("log_metrics", (dict(metrics), step, group)))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("log_hyperparams", (dict(params), args, kwargs)))

    def save(self) -> None:
        self.calls.append(("save", ()))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))

    def log_image(self, image: torch.Tensor) -> int:
        return image.numel()


def log_in_many_ways(model: Model) -> None:
    logger: Any = model.logger
    logger.log_metrics({"a": 1, "b": True, "c": 0.5}, 3)
    logger.log_metrics({"a": 2}, step=np.int64(4), group="extra")
    logger.log_metrics(metrics={"a": "text", "b": (1, 2), 3: {"deep": [1]}})
    logger.log_hyperparams({"betas": (0.9, 0.99), 1: None}, "positional", flag=True)
    logger.log_metrics({"tensor": torch.tensor(4)}, 5)
    assert logger.log_image(torch.zeros(2, 2)) == 4


def test_a_user_logger_gets_the_same_calls_in_order(tmp_path: Path) -> None:
    class Saving(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.logger.finalize("in the middle")
            trainer.logger.save()

    recorders = [Recorder(), Recorder()]
    fit(recorders[0], {1: log_in_many_ways, 2: log_in_many_ways}, Saving())
    fit(recorders[1], {1: log_in_many_ways, 2: log_in_many_ways}, Saving(), offload(tmp_path))
    check_given_back(tmp_path, recorders[1])
    assert [(name, repr(said)) for name, said in recorders[1].calls] == [
        (name, repr(said)) for name, said in recorders[0].calls
    ]


class OnEveryRank(Recorder):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.calls.append(("log_metrics", (dict(metrics), step)))


def test_a_logger_that_writes_on_every_rank_is_called_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loggers = [OnEveryRank(), tensorboard(tmp_path), Recorder()]
    assert all(map(writes_on_this_rank, loggers))
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert [writes_on_this_rank(logger) for logger in loggers] == [True, False, False]
    # As the Trainer does on rank 1, where its other loggers have nothing to write.
    logger, callback = OnEveryRank(), offload(tmp_path)
    trainer = make_trainer([logger, tensorboard(tmp_path / "logs")], callback)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    callback.setup(trainer, Model(), "fit")
    logger.log_metrics({"a": 1.0}, 1)
    assert [name for name, _ in logger.calls] == ["log_metrics"]
    callback.teardown(trainer, Model(), "fit")
    logger.finalize("success")
    assert [name for name, _ in logger.calls] == ["log_metrics", "finalize"]
    assert not (tmp_path / "logs").exists()
    check_given_back(tmp_path, logger)


def test_several_loggers_do_not_interfere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        folder = tmp_path / name
        twice = CSVLogger(folder, name="twice", version=0)
        loggers = [
            tensorboard(folder),
            csv(folder / "csv"),
            TensorBoardLogger(folder, name="other", version=0),
            twice,
            twice,
        ]
        trainer = fit(loggers, {1: call_small_on_first}, *callbacks)
        assert trainer.loggers == loggers
        assert trainer.log_dir == loggers[0].log_dir
        check_given_back(tmp_path, *loggers)
    stock, offloaded = tmp_path / "stock", tmp_path / "offloaded"
    assert stored(offloaded) == stored(stock)
    for path in ("csv/run/version_0/metrics.csv", "twice/version_0/metrics.csv", "run/version_0/hparams.yaml"):
        assert (offloaded / path).read_bytes() == (stock / path).read_bytes()
    assert "[ncclsafe]" not in capsys.readouterr().err
    rows = (offloaded / "twice/version_0/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * STEPS


def call_small_on_first(model: Model) -> None:
    call_small(model.loggers[0].experiment)


@pytest.mark.parametrize("how", ["no logger", "fast_dev_run"])
def test_without_a_logger_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if how == "fast_dev_run":
        trainer = fit(tensorboard(tmp_path / "logs"), None, offload(tmp_path), fast_dev_run=True)
        assert isinstance(trainer.logger, DummyLogger)
    else:
        fit(False, None, offload(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert "[ncclsafe]" not in capsys.readouterr().err


@pytest.mark.parametrize("make_logger", [csv, tensorboard, lambda folder: Recorder()])
def test_a_copy_of_an_offloaded_logger_is_independent(tmp_path: Path, make_logger: Callable[[Path], Any]) -> None:
    copies: list[list[Any]] = []

    def copy_it(model: Model) -> None:
        if isinstance(model.logger, Recorder):
            model.logger.experiment = None
        copies.append([copy.deepcopy(model.logger), pickle.loads(pickle.dumps(model.logger))])

    trainers = [
        fit(make_logger(tmp_path / "stock"), {1: copy_it}),
        fit(make_logger(tmp_path / "offloaded"), {1: copy_it}, offload(tmp_path)),
    ]
    logger: Any = trainers[1].logger
    for expected, found in zip(*copies, strict=True):
        assert type(found) is type(expected)
        assert found.version == expected.version
        added = vars(found).keys() - vars(expected).keys()
        # They are those of the copy's class, as without an offload.
        assert all(getattr(found, name).__self__ is found for name in added)
        assert vars(expected).keys() <= vars(found).keys()
        found.log_metrics({"copied": 1.0}, 50)
        found.finalize("success")
    if isinstance(logger, Recorder):
        assert "copied" not in str(logger.calls)
        assert "copied" in str(found.calls)
    else:
        assert any("copied" in path.read_text(errors="replace") for path in Path(logger.log_dir).iterdir())
    check_given_back(tmp_path, logger)


def run_several(folder: Path, *callbacks: L.Callback) -> None:
    """Validates, fits twice and tests, then goes on with another logger of the same version."""
    torch.manual_seed(7)
    loggers = [tensorboard(folder), csv(folder / "csv")]
    trainer = make_trainer(loggers, *callbacks, limit_val_batches=2, val_check_interval=1.0)
    model = Model()
    trainer.validate(model, verbose=False)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    again = make_trainer([tensorboard(folder)], *callbacks, max_epochs=1)
    again.fit(model)


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_consecutive_trainer_calls_store_the_same_as_stock(tmp_path: Path) -> None:
    run_several(tmp_path / "stock")
    run_several(tmp_path / "offloaded", offload(tmp_path))
    check_given_back(tmp_path)
    # Files of the same second are read in another order.
    expected, found = (stored(tmp_path / name, by_time=True) for name in ("stock", "offloaded"))
    assert found == expected
    steps = [step for step, _ in found["run/version_0"]["scalars", "number"]]
    assert steps == [*range(2 * STEPS), *range(STEPS)]
    path = "csv/run/version_0/metrics.csv"
    assert (tmp_path / "offloaded" / path).read_bytes() == (tmp_path / "stock" / path).read_bytes()


def test_a_finalize_in_mid_training_does_not_end_the_offload(tmp_path: Path) -> None:
    # What Lightning does when SLURM takes the node back, before it requeues the job; the step goes on.
    there: list[Any] = []

    def requeue(model: Model) -> None:
        for logger in model.loggers:
            logger.finalize("finished")
        there.append(stored(Path(model.loggers[0].log_dir))["."].get(("scalars", "number")))
        there.append(Path(model.loggers[1].log_dir, "metrics.csv").read_text().count("\n"))
        call_small(model.loggers[0].experiment)

    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        fit([tensorboard(tmp_path / name), csv(tmp_path / name / "csv")], {2: requeue}, *callbacks)
    check_given_back(tmp_path)
    assert there[:2] == there[2:]
    assert len(there[0]) == 2
    assert stored(tmp_path / "offloaded") == stored(tmp_path / "stock")
    path = "csv/run/version_0/metrics.csv"
    assert (tmp_path / "offloaded" / path).read_bytes() == (tmp_path / "stock" / path).read_bytes()


def test_an_exception_in_training_loses_nothing(tmp_path: Path) -> None:
    def fail(model: Model) -> None:
        call_small(model.logger.experiment)
        raise RuntimeError("a bug of the user's")

    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        with pytest.raises(RuntimeError, match="a bug of the user's"):
            fit(tensorboard(tmp_path / name), {2: fail}, *callbacks)
    check_given_back(tmp_path)
    assert stored(tmp_path / "offloaded") == stored(tmp_path / "stock")


def test_paths_and_types_match_stock(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Noting(TensorBoardLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            seen.append(Path(checkpoint_callback.last_model_path or checkpoint_callback.best_model_path).name)

    def look(model: Model) -> None:
        logger: Any = model.logger
        trainer = model.trainer
        paths = (trainer.log_dir, logger.log_dir, logger.save_dir, logger.root_dir, logger.experiment.get_logdir())
        checkpoint: Any = trainer.checkpoint_callback
        seen.append([*(os.path.relpath(path, folder) for path in (*paths, checkpoint.dirpath))])
        seen.append((type(logger), isinstance(logger, TensorBoardLogger), logger.name, logger.version))
        seen.append((type(logger.experiment).__name__, trainer.loggers == [logger], trainer.logger is logger))

    looks = []
    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        folder = tmp_path / name
        checkpoint = ModelCheckpoint(every_n_train_steps=2)
        logger = Noting(folder, name="run", version=5, sub_dir="sub")
        fit(logger, {1: look}, checkpoint, *callbacks, enable_checkpointing=True)
        seen.append(os.path.relpath(checkpoint.best_model_path, folder))
        looks.append(list(seen))
        seen.clear()
    assert looks[0] == looks[1]
    assert looks[0][-1] == "run/version_5/checkpoints/epoch=0-step=4.ckpt"
    check_given_back(tmp_path, logger)


def test_a_rate_limit_thins_points_but_no_experiment_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [math.sin(number / 7) for number in range(300)]
    values[100], values[200] = 5.0, -5.0

    def log_much(model: Model) -> None:
        for step, value in enumerate(values):
            model.logger.log_metrics({"wave": value}, step)
            model.logger.experiment.add_scalar("direct", value, step)

    fit(tensorboard(tmp_path), {1: log_much}, offload(tmp_path, max_points_per_second=1.0))
    folder = tmp_path / "run"
    wave = scalars(folder, "wave")
    expected = [(step, pytest.approx(value)) for step, value in enumerate(values)]
    assert scalars(folder, "direct") == expected
    assert 3 <= len(wave) < 30
    for kept in (100, 200, 299):
        assert expected[kept] in wave
    assert wave == sorted(wave)
    said = counted(capsys.readouterr().err)
    assert said["thinned"] >= len(values) - len(wave)
    assert said["dropped"] == 0


@pytest.mark.parametrize("policy", ["thin", "drop_oldest", "block"])
def test_stalled_storage_may_lose_points_but_no_hyperparameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    count = 6000
    stall = tmp_path / "stall"
    monkeypatch.setenv(STALL, str(stall))
    waited: list[float] = []

    class Stalling(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            stall.touch()

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            stall.unlink()

    def log_much(model: Model) -> None:
        logger: Any = model.logger
        logger.log_hyperparams({"lr": 0.125}, {"score": 1.0})
        logger.experiment.add_hparams({"lr": 0.125}, {"score": 1.0}, run_name="trial")
        image = torch.zeros(3, 100, 100)
        for step in range(count):
            if step % 200 == 0:
                logger.experiment.add_image("image", image, step)
            began = time.perf_counter()
            logger.log_metrics({"ramp": float(step)}, step)
            waited.append(time.perf_counter() - began)

    callback = offload(
        tmp_path, overflow=policy, block_timeout=0.1, memory_limit_bytes=1 << 20, disk_limit_bytes=1 << 20
    )
    logger = TensorBoardLogger(f"slow://{tmp_path}/logs", name="run", version=0)
    fit(logger, {1: log_much}, Stalling(), callback)
    said = counted(capsys.readouterr().err)
    found = stored(tmp_path / "logs")
    run = found["run/version_0"]
    ramp = [step for step, _ in run["scalars", "ramp"]]
    assert "width: 3" in (tmp_path / "logs/run/version_0/hparams.yaml").read_text()
    assert any("hparams" in str(key) for key in run["plugins"])
    assert found["run/version_0/trial"]["scalars", "score"] == [(0, 1.0)]
    assert ramp == sorted(set(ramp))
    assert len(ramp) < count
    assert ramp[-1] == count - 1
    assert said["dropped"] > 0, "images"
    if policy == "drop_oldest":
        assert said["thinned"] == 0
    else:
        assert said["thinned"] > 0
        assert ramp[0] == 0
    if policy == "block":
        assert max(waited) >= 0.1
    # What was logged is there or counted.
    images = len(run.get(("images", "image"), ()))
    logged = count + 3 * STEPS + 30
    assert len(ramp) + images + said["thinned"] + said["dropped"] <= logged
    assert said["points"] + said["thinned"] + said["dropped"] >= count
    check_given_back(tmp_path, logger)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overflow": "drop"}, ("overflow='drop'", "'thin', 'drop_oldest' or 'block'")),
        ({"memory_limit_bytes": -1}, ("memory_limit_bytes=-1", "at least 1.04858e+06")),
        ({"disk_limit_bytes": 0}, ("disk_limit_bytes=0", "at least 1.04858e+06")),
        ({"memory_limit_bytes": "1 GB"}, ("memory_limit_bytes='1 GB'", "a number")),
        ({"max_points_per_second": 0}, ("max_points_per_second=0", "at least 0.00166667")),
        ({"max_points_per_second": -2.0}, ("max_points_per_second=-2.0", "at least 0.00166667")),
        ({"max_points_per_second": math.nan}, ("max_points_per_second=nan", "a number")),
        ({"block_timeout": 0}, ("block_timeout=0", "longer than 0 s")),
        ({"block_timeout": "10"}, ("block_timeout='10'", "timedelta")),
        ({"finalize_timeout": -1.0}, ("finalize_timeout=-1.0", "longer than 0 s")),
        ({"finalize_timeout": None}, ("finalize_timeout=None", "timedelta")),
    ],
    ids=str,
)
def test_a_wrong_argument_is_reported_with_the_allowed_values(
    arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        LoggerOffload(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("what", ["staging", "backend", "attach"])
def test_a_failed_start_leaves_the_logger_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    logger = csv(tmp_path / "logs")
    if what == "staging":
        (tmp_path / "staging").write_text("a file")
    elif what == "backend":
        monkeypatch.setattr(starting, "_backend", fail)
    else:
        monkeypatch.setattr(CSVBackend, "attach", fail)
    fit(logger, {1: log_rows}, offload(tmp_path))
    error = "" if what == "staging" else "OSError('no space')"
    assert f"the offload of CSVLogger failed and is off; training continues: {error}" in capsys.readouterr().err
    if what == "staging":
        (tmp_path / "staging").unlink()
    check_given_back(tmp_path, logger)
    fit(csv(tmp_path / "stock"), {1: log_rows})
    path = "run/version_0/metrics.csv"
    assert (tmp_path / "logs" / path).read_bytes() == (tmp_path / "stock" / path).read_bytes()


def test_a_changed_working_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loggers = [TensorBoardLogger("logs", name="run", version=0), CSVLogger("csv", name="run", version=0)]
    fit(loggers, {1: lambda model: os.chdir("elsewhere")}, offload(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len(scalars(tmp_path / "logs", "number")) == STEPS
    assert len((tmp_path / "csv/run/version_0/metrics.csv").read_text().splitlines()) == 1 + STEPS
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_running_trainers_can_share_a_logger(tmp_path: Path) -> None:
    for name in ("stock", "offloaded"):
        callbacks = partial(list) if name == "stock" else lambda: [offload(tmp_path)]
        logger = csv(tmp_path / name)
        fit(logger, {1: lambda model, make=callbacks, same=logger: fit(same, None, *make()) and None}, *callbacks())
        check_given_back(tmp_path, logger)
    path = "run/version_0/metrics.csv"
    assert (tmp_path / "offloaded" / path).read_bytes() == (tmp_path / "stock" / path).read_bytes()


def test_two_offloads_of_one_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two LoggerOffload callbacks; pass only one"):
        fit(csv(tmp_path), None, offload(tmp_path), offload(tmp_path))


def log_to_mlflow(model: Model) -> None:
    logger: Any = model.logger
    client, run_id = logger.experiment, logger.run_id
    logger.log_metrics({"metric": 0.5, "odd name!": 1.0}, 3)
    logger.log_metrics({"metric": math.inf})
    client.log_metric(run_id, "direct", 1.5, step=4)
    client.log_metric(run_id, "direct", 2.5, 1234, 5)
    assert client.log_param(run_id, "param", 7) == 7
    client.set_tag(run_id, "tag", "value")
    logger.log_hyperparams({"nested": {"deep": (1, 2)}})
    for step in range(1500):
        logger.log_metrics({"many": step}, step)


@pytest.fixture
def mlflow_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)


def of_run(logger: MLFlowLogger) -> dict[str, Any]:
    client, run_id = logger.experiment, logger.run_id
    data = client.get_run(run_id).data
    history = {key: client.get_metric_history(run_id, key) for key in data.metrics}
    tags = {key: value for key, value in data.tags.items() if not key.startswith("mlflow.")}
    return {
        "params": data.params,
        "tags": tags,
        "status": client.get_run(run_id).info.status,
        "metrics": {key: [(one.step, one.value) for one in these] for key, these in history.items()},
        "times": {key: [one.timestamp for one in these] for key, these in history.items()},
    }


@pytest.mark.usefixtures("mlflow_store")
@pytest.mark.filterwarnings("ignore:MLFlow only allows:RuntimeWarning")
def test_mlflow_stores_the_same_as_stock(tmp_path: Path) -> None:
    runs = []
    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        logger = MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path / name}")
        began = 1000 * time.time()
        fit(logger, {1: log_to_mlflow}, *callbacks)
        check_given_back(tmp_path, logger)
        runs.append(of_run(logger))
        times = runs[-1].pop("times")
        assert times["direct"][1] == 1234
        many = times["many"]
        assert int(began) <= many[0] <= many[-1] <= 1000 * time.time()
        assert many == sorted(many)
    assert runs[1] == runs[0]
    assert runs[0]["status"] == "FINISHED"


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_gets_the_time_of_each_call_and_one_request_for_many(tmp_path: Path) -> None:
    logger = MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path / 'runs'}")
    requests: list[int] = []
    between: list[float] = []
    log_batch = logger.experiment.log_batch

    def counting(run_id: str, metrics: Any = (), **kwargs: Any) -> Any:
        requests.append(len(metrics))
        return log_batch(run_id, metrics, **kwargs)

    def log(model: Model) -> None:
        between.append(1000 * time.time())
        model.logger.log_metrics({"timed": 1.0}, 1)
        model.logger.experiment.log_metric(model.logger.run_id, "direct", 1.0)
        between.append(1000 * time.time())
        for step in range(3000):
            model.logger.log_metrics({"many": step}, step)

    logger.experiment.log_batch = counting
    fit(logger, {1: log}, offload(tmp_path))
    assert vars(logger.experiment).pop("log_batch") is counting
    times = of_run(logger)["times"]
    for tag in ("timed", "direct"):
        assert int(between[0]) <= times[tag][0] <= between[1]
    assert max(requests) <= 1000
    assert len(requests) < 20


@pytest.mark.usefixtures("mlflow_store")
def test_a_metric_refused_by_mlflow_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def log(model: Model) -> None:
        for step in range(5):
            model.logger.log_metrics({"good": step}, step)
        model.logger.log_metrics({"../bad": 1.0}, 5)
        for step in range(5, 10):
            model.logger.log_metrics({"good": step}, step)

    logger = MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path / 'runs'}")
    fit(logger, {1: log}, offload(tmp_path))
    assert of_run(logger)["metrics"]["good"] == [(step, float(step)) for step in range(10)]
    said = capsys.readouterr().err
    assert counted(said)["dropped"] == 1
    assert "../bad" in said


@pytest.mark.usefixtures("mlflow_store")
def test_a_run_terminated_by_the_user_has_all_earlier_points(tmp_path: Path) -> None:
    found: list[Any] = []

    def end(model: Model) -> None:
        logger: Any = model.logger
        logger.log_metrics({"last": 1.0}, 1)
        logger.experiment.set_terminated(logger.run_id, "KILLED")
        found.append(of_run(logger))

    fit(MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path / 'runs'}"), {1: end}, offload(tmp_path))
    assert found[0]["metrics"]["last"] == [(1, 1.0)]
    assert found[0]["status"] == "KILLED"


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    # It asks whether it was started from its own queues, and imports hundreds of modules for that.
    monkeypatch.setitem(sys.modules, "wandb.sdk.launch", None)
    yield wandb
    wandb.teardown()


def log_to_wandb(model: Model) -> None:
    import wandb

    logger: Any = model.logger
    run = logger.experiment
    # Logs a part of a row whenever there are gradients.
    logger.watch(model, log_freq=1)
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    values = [1, 2]
    data = {"list": values, "text": "a"}
    run.log(data)
    values.append(3)
    data["text"] = "b"
    wandb.log({"by module": 1})
    run.log({"part": 1}, commit=False)
    run.log({"other part": 2})
    logger.log_metrics({"metric": 0.5}, 3)
    logger.log_image("image", [image])
    run.log({"histogram": wandb.Histogram([1, 2, 3]), "tensor": torch.tensor(1.5)})
    for number in range(20):
        run.log({"many": number})
        logger.log_metrics({"between": number}, number)
    with pytest.raises(TypeError, match="dictionary"):
        run.log("no dictionary")


class Finishing(L.Callback):
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.logger.experiment.finish()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_wandb_gets_every_row_in_order_with_its_time(tmp_path: Path, wandb_offline: Any) -> None:
    rows = []
    for name, callbacks in (("stock", []), ("offloaded", [offload(tmp_path)])):
        (tmp_path / name).mkdir()
        logger = WandbLogger(save_dir=tmp_path / name, offline=True, id=name)
        ended: list[float] = []

        def log(model: Model, ended: list[float] = ended) -> None:
            log_to_wandb(model)
            ended.append(time.time())

        began = time.time()
        fit(logger, {1: log}, Finishing(), *callbacks)
        check_given_back(tmp_path, logger)
        # wandb's own process writes the file.
        wandb_offline.teardown()
        (file,) = (tmp_path / name).rglob("*.wandb")
        rows.append(wandb_rows(file))
        last = max(float(row["_timestamp"]) for row in rows[-1] if "many" in row)
        times = [float(row.pop("_timestamp")) for row in rows[-1]]
        assert began <= times[0] <= last <= ended[0]
        assert times == sorted(times)
    assert list(map(comparable, rows[1])) == list(map(comparable, rows[0]))
    assert len(rows[0]) > 45
    assert any("gradients/layer.weight/values" in row for row in rows[0])


def comparable(row: dict[str, str]) -> dict[str, str]:
    """A row without paths and times; wandb numbers the models that it has watched."""
    same = {key: value for key, value in row.items() if not key.endswith("_runtime") and "path" not in key}
    return {key.replace("/graph_1", "/"): value for key, value in same.items()}


class FakeExperiment:
    """Comet's, as far as its logger uses it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, dic: Any, prefix: str | None = None, step: int | None = None, epoch: Any = None) -> None:
        self.calls.append(("log_metrics", dic, step, epoch))

    def __internal_api__log_metrics__(self, dic: Any, **kwargs: Any) -> None:
        self.calls.append(("internal", dic, kwargs["step"], kwargs["epoch"], kwargs["prefix"]))

    def log_other(self, key: str, value: Any) -> None:
        self.calls.append(("log_other", key, value))

    def log_asset(self, path: str) -> str:
        return path

    def flush(self) -> None:
        self.calls.append("flush")

    def __internal_api__set_model_graph__(self, **kwargs: Any) -> None:
        self.calls.append("graph")

    # Lightning 2.5.0 has these.
    def set_model_graph(self, model: Any) -> None:
        self.calls.append("graph")

    def end(self) -> None:
        self.calls.append("end")


class FakeComet(CometLogger):
    """Comet's logger without Comet."""

    def __init__(self) -> None:
        self._experiment = FakeExperiment()
        self._prefix = "prefix"
        self._comet_config = None

    @property
    def experiment(self) -> Any:
        return self._experiment

    name = version = save_dir = property(lambda self: "comet")  # type: ignore[assignment]

    def reset_experiment(self) -> None:
        """What it was given is looked at afterwards."""

    def log_hyperparams(self, params: Any) -> None:  # type: ignore[override]
        self._experiment.calls.append(("hyperparams", dict(params)))


def test_comet_gets_the_same_calls_as_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", ModuleType("comet_ml"))
    monkeypatch.setattr(FakeExperiment, "__module__", "comet_ml.experiment")

    def log(model: Model) -> None:
        experiment = model.logger.experiment
        experiment.log_metrics({"direct": 1.0}, step=1)
        experiment.log_other("key", (1, 2))
        assert experiment.log_asset("path") == "path"

    loggers = [FakeComet(), FakeComet()]
    fit(loggers[0], {1: log})
    fit(loggers[1], {1: log}, offload(tmp_path))
    assert loggers[1].experiment.calls == loggers[0].experiment.calls
    assert len(loggers[0].experiment.calls) > STEPS
    check_given_back(tmp_path, loggers[1])
