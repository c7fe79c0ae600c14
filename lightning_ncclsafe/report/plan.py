"""``plan.json``, next to a report: what the next start of the job should do, in JSON and in words."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts.codec import DecodeError, from_plain, to_plain
from lightning_ncclsafe.facts.findings import NextStart, Plan
from lightning_ncclsafe.report.lines import safe

PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"
# A plan has some hundred bytes; the hosts of a large job, some kilobytes.
_MOST_BYTES = 1 << 18
_LONGEST = 2_000
_WORDS = {
    Plan.RESTART: "restart: nobody's fault, or a passing fault of a machine",
    Plan.STOP: "stop: it recurs until the code, its settings or its data change",
    Plan.UNKNOWN: "unknown: the cause does not tell whether a restart helps",
}


def plan_words(start: NextStart) -> str:
    """``"restart without gpu-7: the fault is on that host, and recurs there"``."""
    if start.plan is not Plan.RESTART_WITHOUT_HOST:
        return _WORDS[start.plan]
    whose = "that host" if len(start.hosts) == 1 else "those hosts"
    return safe(f"restart without {', '.join(start.hosts)}: the fault is on {whose}, and recurs there")


def plan_json(start: NextStart) -> bytes:
    """The plan as it is written to the file."""
    plain = to_plain(replace(start, answer=start.answer[:_LONGEST]))
    return json.dumps({"schema": PLAN_SCHEMA, **plain}, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def read_plan(path: Path) -> NextStart | None:
    """Reads such a file; None if it does not exist, is no plain file, is damaged, or has another schema."""
    try:
        # Neither waits for the writer of a pipe, nor follows a link to somewhere else.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return None
            content = file.read(_MOST_BYTES + 1)
        return _parsed(content) if len(content) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _parsed(content: bytes) -> NextStart | None:
    plain: Any = json.loads(content)
    if not isinstance(plain, dict) or plain.get("schema") != PLAN_SCHEMA or isinstance(plain["schema"], bool):
        return None
    try:
        start = from_plain(NextStart, plain)
    except DecodeError:
        return None
    return replace(start, answer=safe(start.answer[:_LONGEST]), hosts=tuple(map(safe, start.hosts)))
