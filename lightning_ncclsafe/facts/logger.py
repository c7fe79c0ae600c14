"""What a rank's offloaded loggers have come to: facts, like those of :mod:`lightning_ncclsafe.facts.job`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerFacts:
    """One logger whose writes have been taken off the training thread.

    Attributes:
        logger: Class name of the logger.
        path: Where it writes; empty for a server that has no path.
        points: Scalar points written.
        records: Everything else written: media, texts, hyperparameters.
        thinned: Points left out, others standing for them.
        dropped: Points and records dropped over a limit.
        memory_bytes: About how much waits in memory, to be staged.
        staged_bytes: How much waits in local staging, to be written.
        writing_s: For how long the write that is going on has waited for the storage, seconds; 0 if there is none.
        longest_write_s: The longest write that has ended, seconds.
        waited_s: For how long training has waited for this logger in total, seconds.
        finalize_s: For how long the end of the run has waited for it, seconds.
        faults: Writes that failed, whether or not a later try succeeded.
        last_fault: The last such failure; empty if there was none.
        staging: The folder of local staging.
    """

    logger: str
    path: str = ""
    points: int = 0
    records: int = 0
    thinned: int = 0
    dropped: int = 0
    memory_bytes: int = 0
    staged_bytes: int = 0
    writing_s: float = 0.0
    longest_write_s: float = 0.0
    waited_s: float = 0.0
    finalize_s: float = 0.0
    faults: int = 0
    last_fault: str = ""
    staging: str = ""
