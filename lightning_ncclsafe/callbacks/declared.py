"""Callbacks that only declare what is wanted: their arguments become settings, and the strategy acts on these."""

import os
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.settings import (
    AgreementSettings,
    CheckpointSettings,
    Content,
    OnMismatch,
    OnProblem,
    OnUneven,
    PreflightSettings,
    TunerSettings,
    seconds,
)
from lightning_ncclsafe.strategies.guarded import guards


class NeedsGuard:
    """A callback that acts through the strategy, and so needs one of this package."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy has the guard, and that this callback is the only one of its class."""
        hooks = next(kind for kind in type(self).__mro__ if NeedsGuard in kind.__bases__)
        refuse_other_trainer(self, trainer)
        refuse_second(hooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"{hooks.__name__.removesuffix('Hooks')} needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )


@without_batch_hooks
class DatasetAgreementHooks(NeedsGuard):
    """Configures how ranks compare their data before training starts, and what happens if it ends unevenly.

    Every strategy of this package compares the loaders of every stage across ranks. Without this callback, it uses
    ``on_mismatch="raise_on_hang"`` and the other defaults below: unequal data on which stock Lightning trains is only a
    warning. This callback, with its defaults, refuses such data.

    Args:
        on_mismatch: ``"raise"``: if ranks disagree about their data, all of them raise
            :class:`~lightning_ncclsafe.DatasetMismatchError` before their workers start. ``"raise_on_hang"``: they
            raise only if they would wait for each other forever: different numbers of batches or of loaders, a length
            that only some of them know, validation after different batches. Different content (each rank has other
            data, or the same share) is printed once for each stage, with the table, and training continues.
            ``"warn"``: the former are printed, too, and only different numbers of loaders still raise, because
            training cannot continue with them.
        content: How much of the data's content is compared. ``"sample"``: up to 65,536 indices and 4,096 file
            names in full, 1,024 of longer lists, and some rows of what is in memory. ``"full"``: all indices and file
            names, and up to 8 samples of the dataset, each read twice; one that differs the second time counts as
            randomly augmented. ``"off"``: only sizes and settings.
        on_uneven: What happens if the data of one rank ends before that of another. ``"raise"``: all ranks raise
            :class:`~lightning_ncclsafe.UnevenDataError` at the first end. ``"stop_together"``: the epoch ends for all
            ranks with the shortest; no batch is trained on by only some of them. ``"repeat"``: ranks whose data has
            ended start over until the longest has ended. If all ranks know their lengths in advance, unequal lengths
            are a mismatch with ``"raise"``, and are made equal otherwise. In ``predict``, ranks are independent.

    Raises:
        ValueError: If an argument is not one of these words, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[DatasetAgreement(on_uneven="stop_together")])
    """

    def __init__(
        self, *, on_mismatch: OnMismatch = "raise", content: Content = "sample", on_uneven: OnUneven = "raise"
    ) -> None:
        self.settings = AgreementSettings(on_mismatch=on_mismatch, content=content, on_uneven=on_uneven)


@without_batch_hooks
class HostPreflightHooks(NeedsGuard):
    """Checks every rank's host before the first step, within 3 s, and compares the results across ranks.

    It checks cores against workers and threads, memory, swap, /dev/shm, open files, GPUs, versions, settings of NCCL
    and torch, the network interface, the directories of logs and checkpoints, and the hosts' clocks. It prints only
    problems and unwanted differences, each with its remedy. ``ncclsafe preflight`` does the same from the shell.

    Args:
        on_problem: ``"raise"``: a problem that would make the run fail raises
            :class:`~lightning_ncclsafe.HostPreflightError` on all ranks. ``"warn"``: it is printed, and training
            starts.
        data_dir: The directory that data is read from, to be tested, too.

    Raises:
        ValueError: If ``on_problem`` is neither, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[HostPreflight(on_problem="raise")])
    """

    def __init__(self, *, on_problem: OnProblem = "warn", data_dir: str | Path | None = None) -> None:
        self.settings = PreflightSettings(
            on_problem=on_problem, data_dir=str(data_dir) if data_dir is not None else None
        )


@without_batch_hooks
class LoaderTunerHooks(NeedsGuard):
    """Gives dataloaders more workers if that makes training faster, and limits settings that would exhaust the host.

    Training begins with your own setting. From the start, and the same in every run, prefetched batches take at most
    half of the free memory, /dev/shm and open files, and there are at most four workers per core of the rank's share.
    In a run that is not seeded, if whole epochs show that waiting for data costs more than workers would, more
    workers are tried for one epoch (or for two minutes of a longer one). They stay if that epoch was faster, including
    the time to start them; otherwise they are never tried again. All ranks have the same number. The loader objects and
    the order of samples do not change.

    A seed is a promise: random augmentation depends on which worker makes a batch. If the run is seeded
    (``seed_everything``, ``torch.manual_seed``), or the loader, its sampler or its dataset has a random generator,
    measurements of time change nothing, and one line says what could be gained.

    Only loaders of map-style datasets in a ``torch.utils.data.DataLoader`` without persistent workers are changed;
    others are left alone and get advice.

    Args:
        apply: False changes nothing, and prints one line of advice for each loader that would profit from more workers.
        apply_to_iterables: Whether loaders of iterable datasets are changed, too; by default they get advice. The
            number of batches of such a dataset may depend on its workers. All ranks have the same number in each epoch.
        apply_to_seeded: Whether more workers are tried in seeded runs, too. Two runs with one seed may then differ.

    Raises:
        ValueError: If a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[LoaderTuner()])
    """

    def __init__(self, *, apply: bool = True, apply_to_iterables: bool = False, apply_to_seeded: bool = False) -> None:
        self.settings = TunerSettings(
            apply=apply, apply_to_iterables=apply_to_iterables, apply_to_seeded=apply_to_seeded
        )


@without_batch_hooks
class JustInTimeCheckpointHooks(NeedsGuard):
    """Saves a run as it ends, from ranks that are still healthy, and resumes from there at the next start.

    While nothing goes wrong, it saves nothing and costs next to nothing. When a run ends because ranks wait in vain, or
    one has died or raised, a rank with an intact model and optimizers writes the state after the last completed
    optimizer step, from another thread than the one that waits, without a collective. If the model is sharded, each
    rank writes its shard. On SIGTERM, all ranks stop before the same batch and save then. A state that cannot be proven
    consistent is not saved, and one line says why.

    The checkpoint, ``just-in-time-epoch=…-step=….ckpt``, is one that stock Lightning loads with
    ``trainer.fit(ckpt_path=…)``; for a sharded model it is a folder. It is written under another name, read back and
    then renamed; it never overwrites another checkpoint.

    Args:
        dirpath: The local or shared folder of these checkpoints, relative to the working directory at the start.
        resume: Whether ``fit`` without a ``ckpt_path`` resumes from the newest complete checkpoint, of this callback or
            of a ``ModelCheckpoint``. If there is none, as at the first start, training begins from scratch.
        keep: How many of these checkpoints are kept; older ones are removed once a newer one is complete.
        grace: How much time the scheduler leaves between SIGTERM, or SLURM's signal, and the end of the processes: a
            ``timedelta``, or seconds. A checkpoint that would not fit is not begun.

    Attributes:
        dirpath: The folder.
        resume: As given.

    Raises:
        ValueError: If ``dirpath`` is remote, ``keep`` is not a whole number of at least 1 or ``grace`` is not longer
            than 0, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[JustInTimeCheckpoint("checkpoints", resume=True)])
    """

    def __init__(
        self,
        dirpath: str | Path = "checkpoints",
        *,
        resume: bool = False,
        keep: int = 2,
        grace: timedelta | float = 30.0,
    ) -> None:
        if "://" in os.fspath(dirpath):
            raise ValueError(f"dirpath={dirpath!r} is remote; it must be a local or mounted folder.")
        self.dirpath = Path(dirpath).absolute()
        self.resume = resume
        self.settings = CheckpointSettings(
            dirpath=self.dirpath, resume=resume, keep=keep, grace_s=seconds("grace", grace), run=uuid.uuid4().hex
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continues as the run that saved the checkpoint, so that this one is among those that are kept."""
        run = checkpoint.get(KEY, {}).get("run")
        self.settings = replace(self.settings, run=run or self.settings.run)
