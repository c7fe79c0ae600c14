"""Names lines of a log that look like errors of unknown formats, as silence would look like health."""

import re
from collections.abc import Iterable


class Unread:
    """Lines that look like errors of unknown formats: their number, and some examples."""

    _ALARM = re.compile(
        r"\[[EF][ \d][^\]]{0,80}\.(?:cpp|hpp|cu):\d+\]|NCCL WARN|[RHX]CCL (?:WARN|ERROR)"
        r"|Dist(?:Backend|Store|Network)Error|\[ERROR\].{0,80}(?:rank|device|collective)|terminated by signal|MPI_ABORT"
        r"|libfabric|NET/\w+ .{0,80}error"
    )
    _SAYS_NO_MORE = re.compile(
        r"Some NCCL operations|To avoid (?:data|this) inconsistency|Exception raised from|Stack trace of the failed"
        r"|debug info|dump signal|Terminating the process|First PG on this rank|terminate called|ncclInvalidUsage"
        r"|flight recorder|timed out in blocking wait|watchdog got stuck|NCCL (?:operations|error)"
        r"|ProcessGroupNCCL\.cpp:\d+\] Rank \d+$|Failed to execute operation|Socket recv failed"
        r"|Error encountered progressing|successfully reached|poll for socket"
    )
    _MOST = 3

    def __init__(self) -> None:
        self._count = 0
        self._lines: dict[str, str] = {}

    def add(self, text: str) -> None:
        """Counts a line if it looks like an error; of lines that differ in numbers only, the first is an example."""
        head = text[:1000]
        if self._ALARM.search(head) and not self._SAYS_NO_MORE.search(text[:2000]):
            self._count += 1
            if len(self._lines) < self._MOST:
                self._lines.setdefault(re.sub(r"\d+", "0", head[:80]), head.strip()[:160])

    @property
    def sentences(self) -> Iterable[str]:
        """One sentence, or none."""
        if self._count:
            shown = "; ".join(f'"{line}"' for line in self._lines.values())
            what = "1 line looks like an error" if self._count == 1 else f"{self._count:,} lines look like errors"
            yield f"{what} in a format that is not known, such as: {shown}."
