"""What became of everything that was logged, in a line."""

from lightning_ncclsafe.facts import LoggerFacts
from lightning_ncclsafe.rules.kit.wording import size_words

# A write that takes longer than this is late: there is one about every second.
_LATE_WRITE_S = 2.0
# So long nobody waits for a storage that is well.
_LONG_WAIT_S = 5.0


def is_worth_saying(facts: LoggerFacts, *, is_done: bool) -> bool:
    """Whether anything was thinned, dropped or late: of what went well nothing is said.

    Args:
        facts: What an offload has come to.
        is_done: Whether everything accepted is on storage.
    """
    is_late = facts.longest_write_s >= _LATE_WRITE_S or max(facts.waited_s, facts.finalize_s) >= _LONG_WAIT_S
    return not is_done or is_late or bool(facts.thinned or facts.dropped or facts.faults)


def summary(facts: LoggerFacts, *, is_done: bool) -> str:
    """What a logger's offload has come to, and where the rest lies if there is one.

    Args:
        facts: What it has come to.
        is_done: Whether everything accepted is on storage.
    """
    to = f" to {facts.path}" if facts.path else ""
    media = f" and {facts.records} other record{'s' * (facts.records != 1)}" if facts.records else ""
    text = (
        f"{facts.logger} wrote {facts.points} point{'s' * (facts.points != 1)}{media}{to}"
        f" ({facts.thinned} thinned, {facts.dropped} dropped); longest write {facts.longest_write_s:.3g} s;"
        f" training waited {facts.waited_s:.3g} s for it, its end {facts.finalize_s:.3g} s"
    )
    if facts.faults:
        text += f"\n{facts.faults} failure{'s' * (facts.faults != 1)}, the last: {facts.last_fault}"
    if not is_done:
        text += f"\nnot everything could be written in time: {size_words(facts.staged_bytes)} wait in {facts.staging};"
        text += f" if this process ends before they are written: ncclsafe logs recover {facts.staging}"
        if facts.memory_bytes:
            text += f"\n{size_words(facts.memory_bytes)} are still in memory, and are lost with this process"
    return text
