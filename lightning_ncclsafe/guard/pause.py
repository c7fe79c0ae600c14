"""What a user announces: a rank will make no progress for a while, and that is intended."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_ncclsafe.probes.trainer.actions import attached_trackers
from lightning_ncclsafe.rules.kit.activity import PAUSE


@contextmanager
def pause(reason: str = "") -> Iterator[None]:
    """Announces that this rank pauses on purpose: in a debugger, at a prompt, while it waits for a person.

    During the ``with`` block, the other ranks wait without a report. The hard limit of the phase (the strategy's
    ``timeout`` or ``PhaseTimeouts``) still ends the run. Outside of a Trainer's function with a strategy of this
    package, it does nothing.

    Args:
        reason: The reason, in a few words; the report quotes it if the hard limit passes.

    Example::

        if self.global_rank == 0:
            with lightning_ncclsafe.pause("a debugger"):
                breakpoint()
    """
    with ExitStack() as stack:
        for tracker in attached_trackers():
            stack.enter_context(tracker.action(f"{PAUSE}{reason}"))
        yield
