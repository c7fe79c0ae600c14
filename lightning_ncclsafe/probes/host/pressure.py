"""What quotas and pressure have cost this process's groups and host so far: counters that only ever grow."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_ncclsafe.facts import PressureFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.cgroups import ControlGroups, Throttling
from lightning_ncclsafe.probes.host.swap import pressure_us

_PROC = Path("/proc")
_RESOURCES = (("cpu", "some"), ("memory", "full"), ("io", "full"))


@dataclass(frozen=True, slots=True)
class PressureLook:
    """One look.

    Attributes:
        throttling: What the quotas have cost; None where no group tells.
        waited_us: Microseconds of pressure by resource: ``"cpu"``, ``"memory"``, ``"io"``; None where not told.
    """

    throttling: Throttling | None
    waited_us: dict[str, int | None]


def look_at_pressure(groups: ControlGroups, proc: Path = _PROC) -> PressureLook:
    """One look; takes about 0.2 ms.

    Args:
        groups: This process's control groups.
        proc: Root of the file system with the kernel's counters.
    """
    waited = {name: or_none(partial(pressure_us, proc / "pressure" / name, kind)) for name, kind in _RESOURCES}
    return PressureLook(throttling=or_none(groups.throttling), waited_us=waited)


def pressure_between(before: PressureLook, after: PressureLook, over_s: float) -> PressureFacts:
    """What happened between two looks.

    Args:
        before: The earlier one.
        after: The later one.
        over_s: Seconds between them.
    """
    earlier, later = before.throttling, after.throttling
    return PressureFacts(
        over_s=round(over_s, 1),
        throttled_s=round(later.throttled_s - earlier.throttled_s, 2) if earlier and later else None,
        periods=later.periods - earlier.periods if earlier and later else None,
        throttled_periods=later.throttled_periods - earlier.throttled_periods if earlier and later else None,
        cpu_waited=_share(before, after, "cpu", over_s),
        memory_stalled=_share(before, after, "memory", over_s),
        io_stalled=_share(before, after, "io", over_s),
    )


def _share(before: PressureLook, after: PressureLook, name: str, over_s: float) -> float | None:
    earlier, later = before.waited_us.get(name), after.waited_us.get(name)
    if earlier is None or later is None or over_s <= 0:
        return None
    # The kernel adds up in steps of its own, so that a short while may get more than its due.
    return round(min(max((later - earlier) / 1e6 / over_s, 0.0), 1.0), 4)
