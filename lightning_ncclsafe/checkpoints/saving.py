"""Saving a run that is being ended: which rank does it, within which time, and what is printed about it.

Every rank that still runs publishes which step its weights belong to, or why that is unknown. The first rank that knows
of all decides which ranks try, and in which order; they try one after another until one has succeeded. Every wait has a
limit, and a wrong decision does no harm: each rank writes to its own temporary name first, and overwrites nothing.
"""

import io
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints import position
from lightning_ncclsafe.checkpoints.boundary import Boundary, NotProvenError
from lightning_ncclsafe.checkpoints.candidates import Candidate, agree_on_savers, publish_shard, savers, writers
from lightning_ncclsafe.checkpoints.contents import contents
from lightning_ncclsafe.checkpoints.folder import KEY, CheckpointFolder
from lightning_ncclsafe.checkpoints.ledger import StepLedger
from lightning_ncclsafe.checkpoints.sharded_save import ShardedSave, failure_words
from lightning_ncclsafe.checkpoints.shards import OwnShard
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, comes_first, poll_interval_s, wait_for, wait_for_keys
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.settings import CheckpointSettings

# How long ranks wait for the others' reports: all are asked by one verdict, or stop before one batch.
_AGREE_S = 2.0
# The share of the time to wait if every rank is needed.
_WORTH = 0.4
# How long a main thread has to finish its current step.
_STEP_S = 1.0
# Time reserved for the last operations, such as the rename.
_RESERVE_S = 0.5
# How often a rank whose own attempt is stuck checks whether another one has saved.
_POLL_S = 0.5
_VERSION = 1
_SAVED = "checkpoint/saved"


# All savers that are at work, on any thread of this process.
_savers: "WeakSet[Saver]" = WeakSet()


def is_saving() -> bool:
    """Whether a checkpoint is being saved in this process, and has time left."""
    return any(saver.is_under_way for saver in [*_savers])


class Saver:
    """One rank's part in saving one call of ``fit``, once.

    Args:
        weights: The state of the model, by Lightning's own way to it.
        shard: This rank's shard of the model; None for a replica.
        last_save_s: How long the last checkpoint took to save, seconds; 0 if unknown.
        last_path: The last checkpoint that was not saved here; empty if there was none.
        left_behind: Gives the known positions of silent ranks after a step.
    """

    def __init__(
        self,
        trainer: Any,
        settings: CheckpointSettings,
        ledger: StepLedger,
        *,
        weights: Callable[[], Mapping[str, Any]],
        rank: int,
        world_size: int,
        exchange: Exchange,
        shard: OwnShard | None = None,
        last_save_s: Callable[[], float] = lambda: 0.0,
        last_path: Callable[[], str] = lambda: "",
        left_behind: Callable[[Iterable[int], int], dict[int, Any]] = lambda ranks, step: {},
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._trainer = trainer
        self._left_behind = left_behind
        self._settings = settings
        self._ledger = ledger
        self._weights = weights
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._shard = shard
        self._last_save_s = last_save_s
        self._last_path = last_path
        self._say = say
        self._lock = threading.Lock()
        self._ends = 0.0
        self._is_abandoned = False
        self._is_over = threading.Event()
        self._is_left = threading.Event()
        # All ranks run now; at the end, some may not.
        if shard is not None and not shard.why_unread:
            publish_shard(exchange, rank, shard.layout)

    def begin(
        self, cause: str, *, budget_s: float, raised: bool = False, finally_do: Callable[[], None] = lambda: None
    ) -> None:
        """Begins to take part in saving, once, on any thread. Never raises.

        Args:
            cause: Why the run ends.
            budget_s: Seconds that saving may take.
            raised: Whether this rank itself has failed.
            finally_do: Called when it is over.
        """
        with self._lock:
            if self._ends:
                return
            self._ends = time.monotonic() + budget_s
        _savers.add(self)

        def act() -> None:
            try:
                is_on_device = self._ledger.is_on_device
                with tensors.beside_others(self._trainer.strategy.root_device) if is_on_device else nullcontext():
                    self._take_part(cause, raised)
            except Exception as error:  # the run ends in any case
                self._say(f"rank {self._rank} cannot save a checkpoint: {failure_words(error)}")
            finally:
                self._is_over.set()
                with suppress(Exception):
                    finally_do()
                self._is_left.set()

        # If storage never answers, this thread is left behind.
        with suppress(RuntimeError):
            threading.Thread(target=act, name="ncclsafe-checkpoint", daemon=True).start()

    @marked(Mark.STORE)
    def wait(self) -> None:
        """Waits until a checkpoint is saved, here or elsewhere, or the time is over; then nothing more is saved."""
        poll_s = max(_POLL_S, poll_interval_s(self._world_size))
        while not self._is_over.wait(min(poll_s, max(0.0, self._left_s()))):
            # If this rank's own attempt is stuck, another rank may have saved.
            is_saved = self._is_saved_elsewhere()
            if not is_saved and self._left_s() > 0.0:
                continue
            # If this rank is not stuck, it learns that in a moment.
            if is_saved and self._is_over.wait(_POLL_S):
                break
            with self._lock:
                is_first, self._is_abandoned = not self._is_abandoned, True
            if is_first and not is_saved and comes_first(self._exchange, "checkpoint/said", self._rank):
                self._say_unsaved("no checkpoint was saved: no time was left")
            return
        self._is_left.wait(_RESERVE_S + max(0.0, self._left_s()))

    def _is_saved_elsewhere(self) -> bool:
        with suppress(ExchangeError):
            return _SAVED in self._exchange.get_many([_SAVED])
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being saved now, and has time left."""
        return not self._is_over.is_set() and time.monotonic() < self._ends

    def _left_s(self) -> float:
        return self._ends - time.monotonic()

    def _take_part(self, cause: str, raised: bool) -> None:
        boundary, candidate = self._own_candidate(raised)
        try:
            order = self._agree(candidate, boundary)
        except ExchangeError:
            # Each rank saves on its own; they do not overwrite each other.
            order = [] if self._shard is not None else savers([candidate])
            if self._shard is not None:
                why = "each rank has only a shard of the model, and this one cannot reach the others"
                self._say_unsaved(f"rank {self._rank} saved no checkpoint: {why}")
        if self._shard is not None:
            self._save_together(boundary, order, cause)
            return
        for number, saver in enumerate(order):
            if saver.rank == self._rank and boundary is not None:
                is_saved = self._save_alone(boundary, order, cause)
                self._publish_outcome(number, is_saved)
            else:
                is_saved = self._await_outcome(number, is_last=number == len(order) - 1)
            if is_saved:
                return

    def _own_candidate(self, raised: bool) -> tuple[Boundary | None, Candidate]:
        try:
            if self._shard is not None and self._shard.why_unread:
                raise NotProvenError(self._shard.why_unread)
            boundary = self._newest()
        except NotProvenError as error:
            return None, Candidate(rank=self._rank, raised=raised, why=str(error))
        shard = self._shard.layout if self._shard is not None else ""
        return boundary, Candidate(
            rank=self._rank, step=boundary.step, validates=boundary.validates, raised=raised, shard=shard
        )

    def _newest(self) -> Boundary:
        # A main thread that is in a step will soon wait.
        wait_for(lambda: not self._ledger.is_in_step, deadline_s=_STEP_S)
        return self._ledger.newest()

    def _agree(self, candidate: Candidate, boundary: Boundary | None) -> Sequence[Candidate]:
        """Publishes what this rank can save; returns the ranks that try, the same on all ranks."""
        if boundary is not None and self._world_size > 1:
            packed = io.BytesIO()
            tensors.save(self._own_position(boundary), packed)
            self._exchange.set(f"checkpoint/position/{self._rank}", packed.getvalue())
        is_split = self._shard is not None
        deadline_s = min(_AGREE_S + self._world_size / 1000, self._left_s() / 3)
        if is_split:
            # Without one rank's shard, the others' are useless: waiting longer is worth it.
            deadline_s = self._left_s() * _WORTH
        order, why_none = agree_on_savers(
            self._exchange, candidate, self._world_size, is_split=is_split, deadline_s=deadline_s
        )
        if why_none and comes_first(self._exchange, "checkpoint/said", self._rank):
            self._say_unsaved(f"no checkpoint was saved: {why_none}")
        return order

    def _await_outcome(self, number: int, *, is_last: bool) -> bool:
        """Whether another rank has saved; waits half of the time, as that rank may have ended."""
        key = _outcome_key(number)
        with suppress(ExchangeError):
            found = wait_for_keys(self._exchange, [key], deadline_s=self._left_s() * (1.0 if is_last else 0.5))
            return bool(found.get(key))
        return False

    def _publish_outcome(self, number: int, is_saved: bool) -> None:
        with suppress(ExchangeError):
            if is_saved:
                self._exchange.set(_SAVED, b"saved")
            self._exchange.set(_outcome_key(number), b"saved" if is_saved else b"")

    def _save_alone(self, boundary: Boundary, order: Sequence[Candidate], cause: str) -> bool:
        """Returns whether it has saved."""
        began = time.monotonic()
        try:
            self._check_time()
            while True:
                try:
                    path = self._write(boundary, order, cause)
                    break
                except NotProvenError:
                    newer = self._newer(boundary)
                    if newer is None:
                        raise
                    boundary = newer
        except Exception as error:
            if not self._is_abandoned:
                self._say_unsaved(
                    f"rank {self._rank} saved no checkpoint of step {boundary.step}: {failure_words(error)}"
                )
            return False
        self._say(
            f"rank {self._rank} saved the state after step {boundary.step} in {time.monotonic() - began:.1f} s: {path}"
        )
        return True

    def _newer(self, than: Boundary) -> Boundary | None:
        """A newer boundary, if there is one: on SIGTERM, training continues to the batch at which all ranks stop."""
        if self._left_s() <= _RESERVE_S or self._is_abandoned:
            return None
        with suppress(NotProvenError):
            boundary = self._newest()
            return boundary if boundary is not than else None
        return None

    def _check_time(self) -> None:
        expected_s = self._last_save_s()
        if expected_s and expected_s > self._left_s() - _RESERVE_S:
            raise TimeoutError(f"the last one took {expected_s:.0f} s, and {self._left_s():.0f} s are left")

    def _save_together(self, boundary: Boundary | None, order: Sequence[Candidate], cause: str) -> None:
        """Each shard of the model is written by one rank; the first of them makes one checkpoint of all."""
        ranks = writers(order)
        if not ranks or boundary is None or self._shard is None:
            return
        began = time.monotonic()
        together = ShardedSave(
            self._exchange,
            self._folder(self._run_of_all()),
            self._ledger,
            boundary,
            self._rank,
            ranks,
            left_s=lambda: self._left_s() - _RESERVE_S,
            may_finish=self._check_not_abandoned,
        )
        if self._rank != ranks[0]:
            if self._rank in ranks:
                together.follow(lambda: self._state_and_rest(boundary)[0])
            self._await_outcome(0, is_last=True)
            return
        is_saved = False
        try:
            self._check_time()

            def whole() -> tuple[dict[str, Any], dict[str, Any]]:
                state, rest = self._state_and_rest(boundary)
                return state, rest | {KEY: self._own_part(boundary, order, cause)}

            path = together.lead(whole)
            is_saved = True
            took_s = time.monotonic() - began
            who = ranks_words(sorted(ranks))
            self._say(f"{who} saved the state after step {boundary.step} together in {took_s:.1f} s: {path}")
        except Exception as error:
            if not self._is_abandoned:
                self._say_unsaved(f"no checkpoint of step {boundary.step} was saved: {failure_words(error)}")
        finally:
            with suppress(ExchangeError):
                together.call_off()
            self._publish_outcome(0, is_saved)

    def _state_and_rest(self, boundary: Boundary) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's part of the sharded state, and the rest, as Lightning separates them."""
        assert self._shard is not None
        made = contents(self._trainer, self._ledger, boundary, self._shard.weights, self._shard.optimizer_state)
        optimizers = enumerate(made.pop("optimizer_states", []))
        state = {self._shard.model_key: made.pop("state_dict")}
        return state | {f"optimizer_{number}": state for number, state in optimizers}, made

    def _own_part(self, boundary: Boundary, order: Sequence[Candidate], cause: str) -> dict[str, Any]:
        """Our own entry in a checkpoint, next to Lightning's."""
        return {
            "version": _VERSION,
            "world_size": self._world_size,
            "positions": self._positions(boundary, order),
            "cause": cause,
            "created_ns": time.time_ns(),
            "run": self._run_of_all(),
            "job": launch_words(),
        }

    def _folder(self, run: str) -> CheckpointFolder:
        return CheckpointFolder(self._settings.dirpath, keep=self._settings.keep, run=run)

    def _write(self, boundary: Boundary, order: Sequence[Candidate], cause: str) -> Path:
        made = contents(self._trainer, self._ledger, boundary, self._weights)
        made[KEY] = self._own_part(boundary, order, cause)
        # A copy from the device cannot change any more; other state is read while the file is written.
        if self._ledger.is_on_device:
            made = tensors.to_host(made)
            self._ledger.check(boundary)
        return self._folder(made[KEY]["run"]).write(
            boundary.epoch, boundary.step, lambda file: tensors.save(made, file), lambda: self._may_finish(boundary)
        )

    def _may_finish(self, boundary: Boundary) -> None:
        if not self._ledger.is_on_device:
            self._ledger.check(boundary)
        self._check_not_abandoned()

    def _check_not_abandoned(self) -> None:
        if self._is_abandoned:
            raise TimeoutError("it took too long")

    def _positions(self, boundary: Boundary, order: Sequence[Candidate]) -> dict[int, Any]:
        """The positions of ranks at the same boundary; None for the others."""
        positions: dict[int, Any] = dict.fromkeys(range(self._world_size))
        positions[self._rank] = self._own_position(boundary)
        same = {
            f"checkpoint/position/{each.rank}": each.rank
            for each in order
            if (each.step, each.validates) == (boundary.step, boundary.validates) and each.rank != self._rank
        }
        with suppress(ExchangeError):
            for key, packed in self._exchange.get_many(same).items():
                with suppress(Exception):
                    positions[same[key]] = tensors.load_plain(io.BytesIO(packed))
        # Ranks of this host that were killed, or cannot answer.
        answered = {self._rank, *(each.rank for each in order if each.step == boundary.step)}
        silent = [rank for rank in positions if rank not in answered]
        return positions | self._left_behind(silent, boundary.step)

    def _own_position(self, boundary: Boundary) -> Any:
        """This rank's position at the boundary; its present position if hooks at the end of the batch still run."""
        if boundary.is_over:
            return boundary.position
        with suppress(Exception):
            return position.capture(self._trainer)
        return None

    def _run_of_all(self) -> str:
        try:
            return self._exchange.set_if_absent("checkpoint/run", self._settings.run.encode()).decode()
        except ExchangeError:
            return self._settings.run

    def _say_unsaved(self, why: str) -> None:
        path = self._last_path()
        self._say(f"{why}; the last checkpoint is {path}" if path else f"{why}; this run has no earlier checkpoint")


def _outcome_key(number: int) -> str:
    """Where the rank whose turn it was publishes whether it has saved: empty if not."""
    return f"checkpoint/outcome/{number}"
