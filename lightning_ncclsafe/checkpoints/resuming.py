"""Resumes one call of ``fit``: gives Lightning the checkpoint, and restores each rank's position in its data."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_ncclsafe.checkpoints.finding import agree_on_newest, why_unfit
from lightning_ncclsafe.checkpoints.folder import KEY, job_of, own_part, paths_of
from lightning_ncclsafe.checkpoints.position import DataPosition
from lightning_ncclsafe.checkpoints.position_file import PositionFile, read_position
from lightning_ncclsafe.code.patching import WrappedMethod
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.settings import CheckpointSettings

# Ranks get here within a moment of each other, but listing a folder on slow storage takes time.
_AGREE_S = 60.0


def _file_key(rank: int) -> str:
    return f"position/{rank}"


class Resuming:
    """Makes Lightning resume where an earlier start has ended, and keeps the position for the next start.

    Lightning looks for its checkpoint after all ranks have joined, so they can agree on one.
    """

    def __init__(
        self,
        trainer: Any,
        settings: CheckpointSettings,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        local_ranks: Iterable[int] = (),
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._local_ranks = tuple(local_ranks)
        self._left_behind = self._leave_behind()
        self._files: dict[int, Path] = {}
        self._position = DataPosition(trainer, left_behind=self._left_behind)
        self._start: WrappedMethod | None = None

    def _leave_behind(self) -> PositionFile | None:
        """Makes the file in which other ranks of this host find this rank's position; None if that fails."""
        if self._world_size == 1 or self._trainer.state.fn != "fit":
            return None
        try:
            left = PositionFile(self._rank)
            self._exchange.set(_file_key(self._rank), str(left.path).encode())
        except (OSError, ExchangeError):
            return None
        return left

    def positions_in_files(self, ranks: Iterable[int], step: int) -> dict[int, dict[str, Any]]:
        """The positions of silent ranks of this host, if they follow this optimizer step."""
        found = {rank: read_position(self._files[rank], step) for rank in ranks if rank in self._files}
        return {rank: position for rank, position in found.items() if position is not None}

    def attach(self) -> None:
        """Wraps how Lightning finds its checkpoint, until :meth:`detach`; only for ``fit``."""
        if self._trainer.state.fn == "fit":
            self._position.attach()
            self._start = WrappedMethod(self._trainer._checkpoint_connector, "resume_start", self._resume_start)

    def detach(self) -> None:
        """Restores Lightning's methods."""
        if self._start is not None:
            self._start.remove()
            self._position.detach()
        if self._left_behind is not None:
            self._left_behind.close()

    def _resume_start(self, start: Callable[..., None], checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        # Read now, as all ranks are there; the store may be gone when this is needed.
        keys = {_file_key(rank): rank for rank in self._local_ranks if rank != self._rank}
        with suppress(ExchangeError):
            self._files = {keys[key]: Path(os.fsdecode(path)) for key, path in self._exchange.get_many(keys).items()}
        connector = self._trainer._checkpoint_connector
        finds = self._settings.resume and (not checkpoint_path or checkpoint_path == connector._hpc_resume_path)
        if finds:
            checkpoint_path = self._find(checkpoint_path) or None
        start(checkpoint_path, *args, **kwargs)
        loaded = connector._loaded_checkpoint
        if loaded and (finds or KEY in loaded):
            positions = self._positions_in(loaded)
            knows_all = all(one is not None and one.get("loaders") for one in positions)
            self._position.resume(positions[self._rank], knows_all=knows_all)
            if self._rank == 0:
                silent = [rank for rank, one in enumerate(positions) if one is None]
                more = f"; random numbers of {ranks_words(silent)} start anew" if silent else ""
                other = _other_job(job_of(loaded))
                by = f", saved by another job ({other})" if other else ""
                say_on_stderr(f"resuming from {checkpoint_path}{by}{more}")

    def _find(self, of_slurm: Any) -> str:
        callbacks = getattr(self._trainer, "checkpoint_callbacks", ())
        named = (getattr(callback, "dirpath", None) for callback in callbacks)
        folders = [self._settings.dirpath, *(Path(path) for path in named if path and "://" not in str(path))]
        # Lightning saves its own checkpoint for SLURM elsewhere.
        folders += [Path(of_slurm).parent] if of_slurm else []
        return agree_on_newest(
            folders,
            self._exchange,
            rank=self._rank,
            world_size=self._world_size,
            deadline_s=_AGREE_S,
            fits=self._why_unfit,
        )

    def _why_unfit(self, path: Path) -> str:
        """Called on rank 0 only."""
        # Two jobs may share the folder, even at the same time: each resumes from its own checkpoints, once it has any.
        other = _other_job(job_of(path))
        if other and any(job_of(one) == launch_words() for one in paths_of(self._settings.dirpath)):
            return f"another job saved it ({other}), and this job has its own checkpoints"
        return why_unfit(path, self._expected(), steps=int(self._trainer.global_step))

    def _expected(self) -> Mapping[str, Any] | None:
        """The model state that a checkpoint must have; None if it may differ, or the model is sharded."""
        module, strategy = self._trainer.lightning_module, self._trainer.strategy
        changes_it = not type(module).on_load_checkpoint.__module__.endswith(".core.hooks")
        if strategy.restore_checkpoint_after_setup or changes_it or not getattr(module, "strict_loading", True):
            return None
        try:
            state: Mapping[str, Any] = module.state_dict()
        except Exception:  # the model is made later
            return None
        return state

    def _positions_in(self, loaded: Mapping[str, Any]) -> list[Mapping[str, Any] | None]:
        """The positions of all ranks; None for each rank without one, or if the world size has changed."""
        ours = own_part(loaded)
        positions = ours.get("positions")
        if not isinstance(positions, Mapping) or ours.get("world_size") != self._world_size:
            return [None] * self._world_size
        found = (positions.get(rank) for rank in range(self._world_size))
        return [one if isinstance(one, Mapping) else None for one in found]


def _other_job(job: str) -> str:
    """The job that saved a checkpoint, if it is not this one; empty if either has no name."""
    mine = launch_words()
    return job if mine and job != mine else ""
