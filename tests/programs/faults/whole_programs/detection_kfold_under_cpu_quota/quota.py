"""House rules of the shared host: a training process gets a budget of CPU seconds, against runaway jobs."""

import math
import resource


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def apply_budget(seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(cpu_seconds() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))  # <- here
