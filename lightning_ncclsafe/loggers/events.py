"""TensorBoard's events, created by torch's own SummaryWriter but caught before they are written."""

import os
import socket
import struct
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams, scalar
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

from lightning_ncclsafe.loggers.intake import LoggedScalars

# TensorFlow's constant for checksums of data that holds checksums (tensorflow/core/lib/hash/crc32c.h).
_MASK = 0xA282EAD8

_files = count()


class CaughtFile(FileWriter):
    """torch's writer of one event file, which passes on its events instead of writing them.

    Args:
        take: Called with the directory and each serialised event.
        now: Wall-clock time of events without one, seconds since the epoch.
    """

    def __init__(self, logdir: str, take: Callable[[str, bytes], None], now: Callable[[], float] = time.time) -> None:
        self._logdir = logdir
        self._take = take
        self._now = now

    def get_logdir(self) -> str:
        """The directory of the file."""
        return self._logdir

    def add_event(self, event: Any, step: Any = None, walltime: float | None = None) -> None:
        """Passes on an event."""
        event.wall_time = self._now() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        self._take(self._logdir, event.SerializeToString())

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def reopen(self) -> None:
        """Does nothing."""


class _CaughtFiles(dict[str, CaughtFile]):
    """``SummaryWriter.all_writers`` with a writer for every directory."""

    def __init__(self, make: Callable[[str], CaughtFile]) -> None:
        self._make = make

    def __contains__(self, logdir: object) -> bool:
        return True

    def __missing__(self, logdir: str) -> CaughtFile:
        return self._make(logdir)


class EventMaker(SummaryWriter):
    """Creates the events of ``add_…`` calls. Belongs to one thread.

    Args:
        settings: Attributes of the SummaryWriter whose calls it makes, such as its bins for histograms.
    """

    def __init__(self, logdir: str, **settings: Any) -> None:
        self._made: list[tuple[str, bytes]] = []
        self._created = 0.0
        self._files = _CaughtFiles(lambda there: CaughtFile(there, self._add, lambda: self._created))
        super().__init__(logdir)
        vars(self).update(settings)

    def make(self, name: str, args: Any, kwargs: Any, created: float) -> list[tuple[str, bytes]]:
        """The events of one call (of ``add_image`` for instance), each with its directory.

        Args:
            created: Time of the call, seconds since the epoch.
        """
        self._made, self._created = [], created
        getattr(self, name)(*args, **kwargs)
        return self._made

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: Any, global_step: Any = None, walltime: float | None = None
    ) -> None:
        """Torch's own method uses the time at which it runs."""
        super().add_scalars(main_tag, tag_scalar_dict, global_step, self._created if walltime is None else walltime)

    def add_hparams(
        self,
        hparam_dict: Any,
        metric_dict: Any,
        hparam_domain_discrete: Any = None,
        run_name: str | None = None,
        global_step: Any = None,
    ) -> None:
        """Torch's own method writes to files with its own writer."""
        if type(hparam_dict) is not dict or type(metric_dict) is not dict:
            raise TypeError("hparam_dict and metric_dict should be dictionary.")
        file = self._files[os.path.join(str(self.log_dir), run_name or str(self._created))]
        for summary in hparams(hparam_dict, metric_dict, hparam_domain_discrete):  # type: ignore[no-untyped-call]
            file.add_summary(summary, global_step)
        for tag, value in metric_dict.items():
            file.add_summary(scalar(tag, value), global_step)  # type: ignore[no-untyped-call]

    def _get_file_writer(self) -> CaughtFile:
        self.all_writers: Any = self._files
        self.file_writer: Any = self._files[str(self.log_dir)]
        return self._files[str(self.log_dir)]

    def _add(self, logdir: str, event: bytes) -> None:
        self._made.append((logdir, event))


def scalar_event(scalars: LoggedScalars) -> bytes:
    """One event for all scalars of a call."""
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.values.items()]
    event = Event(wall_time=scalars.created, summary=Summary(value=values))
    if scalars.step is not None:
        event.step = int(scalars.step)
    return bytes(event.SerializeToString())


def first_event() -> bytes:
    """The first event of an event file."""
    source = SourceMetadata(writer="lightning_ncclsafe")
    event = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    return bytes(event.SerializeToString())


def file_name(suffix: str) -> str:
    """A name for a new event file, as TensorBoard creates them, unique in this process."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.n{next(_files)}{suffix}"


def record(event: bytes) -> bytes:
    """An event as a TFRecord: length, its checksum, the event, its checksum."""
    length = struct.pack("<Q", len(event))
    return b"".join((length, _checksum(length), event, _checksum(event)))


def _checksum(data: bytes) -> bytes:
    # TensorBoard's own is a loop in Python: 0.1 s per megabyte, all with the GIL held.
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)
