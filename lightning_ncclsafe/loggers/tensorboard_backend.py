"""TensorBoard: whatever reaches the SummaryWriter becomes whole records that are appended to its event files."""

import copy
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.tensorboard._convert_np import make_np
from torch.utils.tensorboard._utils import figure_to_image
from torch.utils.tensorboard.writer import SummaryWriter

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.loggers.capture import ArgumentCopier, copied_call
from lightning_ncclsafe.loggers.destinations import LocalDestination
from lightning_ncclsafe.loggers.events import CaughtFile, EventMaker, file_name, first_event, record, scalar_event
from lightning_ncclsafe.loggers.files_backend import HPARAMS, FilesBackend
from lightning_ncclsafe.loggers.intake import LoggedCall, LoggedScalars
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.media import LARGE_BYTES, MediaProcess, MediaProcessError
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store

# These trace, or read a file, when called; only their result is written later.
_NOW = {"add_graph", "add_onnx_graph"}
# Small, and in order with the scalars; everything else is encoded on a separate thread.
_IN_LINE = {
    "add_scalar",
    "add_scalars",
    "add_text",
    "add_hparams",
    "add_custom_scalars",
    "add_custom_scalars_multilinechart",
    "add_custom_scalars_marginchart",
}
# Never dropped.
_KEPT = {"add_hparams"}


@marked(Mark.LOGGER)
class TensorBoardBackend(FilesBackend):
    """Takes a ``TensorBoardLogger`` and its ``SummaryWriter`` off the training thread."""

    # Embeddings have several files.
    file_names = ("tfevents", HPARAMS, ".tsv", ".pbtxt", "sprite.png")

    def __init__(self, logger: Any, *, store: Store, ledger: Ledger, to_yaml: Callable[[Any], bytes]) -> None:
        super().__init__(logger, str(logger.log_dir), store=store, ledger=ledger, to_yaml=to_yaml)
        settings = {"default_bins": self._writer.default_bins}
        # One for each thread that creates events.
        self._in_line = EventMaker(self.path, **settings)
        self._aside = EventMaker(self.path, **settings)
        self._process = MediaProcess(self.path, settings)
        self._hparams_are_staged = False
        # The event file of each directory, relative to the logger's directory.
        self._files: dict[str, str] = {}
        self._files_lock = threading.Lock()
        self._keeps = threading.local()

    def detach(self) -> None:
        """Restores the methods; the writer opens a new file when used again, as after any ``close``."""
        super().detach()
        self._writer.close()
        self._process.refuse()

    def close(self) -> None:
        """Ends the process that encodes media."""
        self._process.close()

    def scalars(self, scalars: Sequence[LoggedScalars]) -> list[StagedFrame]:
        """One record for each call."""
        body = b"".join(record(scalar_event(one)) for one in scalars)
        return [self._frame(self.path, body, points=sum(len(one.values) for one in scalars))]

    def call(self, call: LoggedCall) -> list[StagedFrame]:
        """The records of one call."""
        if call.name == HPARAMS:
            return [self._hparams_frame(call, if_absent=True)]
        events = [call.args] if call.name == "event" else self._events(call)
        return [self._frame(logdir, record(event), records=1, keep=call.keep) for logdir, event in events]

    def _replace_methods(self) -> None:
        self._continue_open_file()
        writer, logger, replace = self._writer, self._logger, self._replacements.replace
        # A method of the user's own class runs when called, and calls these in turn.
        names = [name for name in dir(SummaryWriter) if name.startswith("add_") and name not in _NOW]
        calls: dict[str, Callable[..., Any]] = {name: partial(self._queue, name) for name in names}
        calls |= {
            "add_scalar": self._add_scalar,
            "add_figure": self._add_figure,
            "add_hparams": partial(self._add_hparams, writer.add_hparams),
            # It writes its own files.
            "add_embedding": partial(self._run_later, writer.add_embedding),
            "_get_file_writer": self._caught_file,
            "flush": lambda: None,
            "close": self._files.clear,
        }
        for name, call in calls.items():
            if getattr(type(writer), name, None) is getattr(SummaryWriter, name):
                replace(writer, name, call)
        is_own_save = type(logger).save.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
        # The user's own is called in place, so that its other effects show at once.
        replace(logger, "save", partial(self._save, logger.save if is_own_save else None))
        replace(logger, "log_hyperparams", partial(self._log_hyperparams, logger.log_hyperparams))
        super()._replace_methods()
        # Some use the writer of the file itself.
        writer.file_writer = self._caught_file()
        writer.all_writers = {self.path: writer.file_writer}

    def _continue_open_file(self) -> None:
        file = os.path.basename(self._writer.file_writer.event_writer._file_name) if self._writer.file_writer else ""
        self._writer.close()
        size = self._destination.size(file) if file and isinstance(self._destination, LocalDestination) else None
        if size is not None:
            self._files[self.path] = file
            self._store.anchors[file] = {"size": size}
            self._store.note()

    def _log_hyperparams(self, log_hyperparams: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._keeps.is_on = True
        try:
            return log_hyperparams(*args, **kwargs)
        finally:
            self._keeps.is_on = False

    def _add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: Any = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        if self._collecting.is_on and not (new_style or double_precision):
            if not isinstance(tag, str):
                raise TypeError(f"a tag must be a str, not {tag!r}")
            # As in torch, but faster for the usual types.
            is_plain = type(scalar_value) in (float, int)
            value = float(scalar_value if is_plain else make_np(scalar_value).squeeze())
            step = None if global_step is None else int(global_step)
            self._collecting.add(tag, value, step, walltime or time.time())
            return
        self._queue("add_scalar", tag, scalar_value, global_step, walltime, new_style, double_precision)

    def _add_figure(
        self, tag: str, figure: Any, global_step: Any = None, close: bool = True, walltime: float | None = None
    ) -> None:
        # Only one thread may use Matplotlib.
        layout = "NCHW" if isinstance(figure, list) else "CHW"
        image = figure_to_image(figure, close)  # type: ignore[no-untyped-call]
        self._queue("add_image", tag, image, global_step, walltime, dataformats=layout)

    def _queue(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._offload.put(copied_call(name, args, kwargs, keep=name in _KEPT, is_media=name not in _IN_LINE))

    def _add_hparams(
        self,
        add_hparams: Callable[..., Any],
        hparam_dict: Any,
        metric_dict: Any,
        hparam_domain_discrete: Any = None,
        run_name: str | None = None,
        global_step: Any = None,
    ) -> None:
        args = (hparam_dict, metric_dict, hparam_domain_discrete, run_name, global_step)
        if self._is_ours(os.path.join(self.path, run_name or "")):
            self._queue("add_hparams", *args)
        else:
            self._run_later(add_hparams, *args)

    def _run_later(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        copied = ArgumentCopier()
        job = partial(self._try, method, *copied.copy(args), **copied.copy(kwargs))
        self._offload.run_on_delivery(job, copied.data_bytes)

    def _try(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Runs on the thread that delivers, which retries errors of the storage, but not of the caller."""
        try:
            method(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            self._ledger.lose(method.__name__, error)

    def _caught_file(self) -> CaughtFile:
        def take(logdir: str, event: bytes) -> None:
            keep = getattr(self._keeps, "is_on", False)
            self._offload.put(LoggedCall(name="event", args=(logdir, event), data_bytes=len(event), keep=keep))

        return CaughtFile(self.path, take)

    def _save(self, own: Callable[[], None] | None) -> None:
        if own is not None:
            own()
        if not self._hparams_are_staged:
            self._hparams_are_staged = True
            self._put_hparams(copy.copy(self._logger.hparams))

    def _events(self, call: LoggedCall) -> list[tuple[str, bytes]]:
        if not call.is_media:
            return self._in_line.make(call.name, call.args, call.kwargs, call.created)
        if call.data_bytes >= LARGE_BYTES:
            args, kwargs = _on_cpu(call.args), _on_cpu(call.kwargs)
            with suppress(MediaProcessError):
                return self._process.make(call.name, args, kwargs, call.created)
        return self._aside.make(call.name, call.args, call.kwargs, call.created)

    def _frame(self, logdir: str, body: bytes, **counts: Any) -> StagedFrame:
        """The frame of these records."""
        with self._files_lock:
            file = self._files.get(logdir) or self._begin_file(logdir)
        return StagedFrame(kind="append", file=file, body=body, **counts)

    def _begin_file(self, logdir: str) -> str:
        """Begins a new event file in a directory."""
        if not self._is_ours(logdir):
            raise ValueError(f"{logdir} is outside of {self.path}")
        folder = os.path.relpath(logdir, self.path) if logdir != self.path else ""
        suffix = str(getattr(self._writer, "filename_suffix", ""))
        file = "/".join(filter(None, (folder, file_name(suffix))))
        # Staged before anybody knows the file: two threads write to it, and it has to begin with this.
        self._store.append([StagedFrame(kind="append", file=file, body=record(first_event()), keep=True)])
        self._files[logdir] = file
        return file

    def _is_ours(self, logdir: str) -> bool:
        return "\0" not in logdir and os.path.relpath(logdir, self.path).split(os.sep)[0] != os.pardir


def _on_cpu(value: Any) -> Any:
    """Tensors as arrays, which can be sent to a process."""
    if isinstance(value, torch.Tensor):
        tensor = value.cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value
