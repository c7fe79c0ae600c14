"""One save of a checkpoint outside of a call of the Trainer, in which ranks wait for each other as well."""

import threading
from typing import Any

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.strategies.guarded_call import GuardedCall, place_of

# Most saves are over by then, and cost only a thread. Making a guard takes some ten milliseconds.
_SHORT_S = 0.5


class GuardedSave(GuardedCall):
    """One call of ``Trainer.save_checkpoint`` after a guarded call.

    It waits for no other rank: the save itself does, and the others may never come. The guard is made on a thread once
    the save takes long, or when it fails.
    """

    def begin(self, strategy: Any) -> None:
        """Prepares the guard, over the store of the process group that is still there."""
        self._strategy = strategy
        self._exchanges.count_save()
        self.trainer_probe.started = True
        self._safely(lambda: self.tracker.attach(self._trainer.profiler))
        self._later = threading.Timer(_SHORT_S, self._start)
        self._later.name, self._later.daemon = "ncclsafe-save", True
        self._safely(self._later.start)

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """Reports a broken connection; what this rank itself raises, its program may catch, and only others ask why."""
        self._settle()
        if self._guard is None:
            self._start()
        self._leaves = self._has_failed = True
        self.raised(error, "Trainer.save_checkpoint")
        if process_groups.is_communication_error(error) or isinstance(error, CollectiveTimeoutError):
            return self._leaving(lambda guard: guard.failed(error))
        self._leaving(lambda guard: guard.share_last_facts(error))
        return None

    def close(self) -> None:
        """Restores everything."""
        self._settle()
        super().close()

    def _settle(self) -> None:
        """From now on, no other thread makes the guard."""
        self._later.cancel()
        if self._later.ident is not None:
            self._later.join()

    def _start(self) -> None:
        self._safely(self._connect_guard)

    def _connect_guard(self) -> None:
        self._guard = self._make_guard(self._strategy, place_of(self._strategy), MemoryExchange())
        self._guard.start()
        self._guard.connect(self._exchanges.of_save(), meets=False)
