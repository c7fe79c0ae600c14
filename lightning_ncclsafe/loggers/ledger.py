"""What became of everything that one logger was given, and what is printed about it."""

from collections.abc import Callable, Sequence

from lightning_ncclsafe.facts import LoggerFacts
from lightning_ncclsafe.facts.wording import size_words
from lightning_ncclsafe.loggers.segments import StagedFrame

# How many different failures of single calls are printed.
_MOST_REPORTED = 5
# A write that takes longer is late, as there is one about every second.
_LATE_WRITE_S = 2.0
# Healthy storage takes less.
_LONG_WAIT_S = 5.0


class Ledger:
    """Counts what is lost, and reports each kind of trouble once.

    Attributes:
        waited_s: How long training has waited, seconds.
        longest_wait_s: Its longest single wait, seconds.
        finalize_s: How long the end of the run has waited, seconds.
        lost: Points, and everything else, that were left out because they could not be written.
        refused_points: The lost points that the storage or server refused.
        refused_records: Everything else that it refused.
        failures: How often something was left out.
        last_failure: The last message about that.
    """

    def __init__(self, logger: str, say: Callable[[str], None]) -> None:
        self.waited_s = 0.0
        self.longest_wait_s = 0.0
        self.finalize_s = 0.0
        self.lost = 0
        self.refused_points = 0
        self.refused_records = 0
        self.failures = 0
        self.last_failure = ""
        self._logger = logger
        self._say = say
        self._reported: set[str] = set()

    def wait(self, waited_s: float) -> None:
        """Counts a wait of training."""
        self.waited_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)

    def lose(self, name: str, error: Exception, count: int = 1) -> None:
        """Counts what cannot be written, whatever its storage: points and everything else of a call, or of a file."""
        self.lost += count
        self.failures += 1
        self.last_failure = f"{self._logger}: {name} failed: {error!r:.500}"
        # Errors of one kind may differ in a step or a value from call to call.
        kind = f"{name} {type(error).__name__}"
        if kind not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(kind)
            self._say(f"{self.last_failure}; it is skipped, and training continues")

    def refuse(self, frames: Sequence[StagedFrame], error: Exception) -> None:
        """Counts frames of one file, or one call, that the storage or server refuses permanently."""
        points, records = sum(frame.points for frame in frames), sum(frame.records for frame in frames)
        self.refused_points += points
        self.refused_records += records
        self.lose(frames[0].file, error, points + records)

    def report_storage_fault(self, error: Exception, path: str, staging: str) -> None:
        """Reports once that the storage or server refuses what it is given."""
        self._report_once(
            "storage",
            f"{self._logger} cannot write to {path or 'its server'}: {error!r:.500}; training continues, the write is"
            f" retried, and what is logged waits in {staging}",
        )

    def report_staging_fault(self, error: OSError) -> None:
        """Reports once that local staging cannot be written to."""
        self._report_once(
            "staging",
            f"{self._logger}: local staging failed: {error!r:.500}; training continues, and what is logged waits in"
            " memory; until staging works again, it is lost if this process is killed",
        )

    def sum_up(self, facts: LoggerFacts, *, is_done: bool) -> None:
        """Prints what became of everything, unless all went well."""
        if is_worth_printing(facts, is_done=is_done):
            self._say(summary(facts, is_done=is_done))

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(text)


def is_worth_printing(facts: LoggerFacts, *, is_done: bool) -> bool:
    """Whether anything was thinned, dropped, late or, unless ``is_done``, not written: otherwise nothing is printed."""
    # In a long run what each call takes adds up.
    is_late = facts.longest_write_s >= _LATE_WRITE_S or max(facts.longest_wait_s, facts.finalize_s) >= _LONG_WAIT_S
    return not is_done or is_late or bool(facts.thinned or facts.dropped or facts.faults)


def summary(facts: LoggerFacts, *, is_done: bool) -> str:
    """What became of everything that was logged, and where the rest is unless ``is_done``."""
    to = f" to {facts.path}" if facts.path else ""
    media = f" and {facts.records} other record{'s' * (facts.records != 1)}" if facts.records else ""
    text = (
        f"{facts.logger} wrote {facts.points} point{'s' * (facts.points != 1)}{media}{to}"
        f" ({facts.thinned} thinned, {facts.dropped} dropped); longest write {facts.longest_write_s:.3g} s;"
        f" training waited {facts.waited_s:.3g} s for it, and the end of the run {facts.finalize_s:.3g} s"
    )
    if facts.faults:
        text += f"\n{facts.faults} failure{'s' * (facts.faults != 1)}, the last: {facts.last_fault}"
    if not is_done:
        text += f"\nnot everything could be written in time: {size_words(facts.staged_bytes)} wait in {facts.staging};"
        text += f" if this process ends before they are written, run: ncclsafe logs recover {facts.staging}"
        if facts.memory_bytes:
            text += f"\n{size_words(facts.memory_bytes)} are still in memory and are lost when this process ends"
    return text
