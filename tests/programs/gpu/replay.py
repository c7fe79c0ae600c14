"""What the package makes of recorded dumps: facts, a verdict, and who was late; none of it needs a GPU."""

import base64
import io
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from recordings import Recording as File

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.collectives.recording import PhaseHistory, Recording
from lightning_ncclsafe.facts import (
    Collective,
    Frame,
    Group,
    Incident,
    IncidentKind,
    JobFacts,
    Phase,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.findings import Finding
from lightning_ncclsafe.probes.process import flight_recorder
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.timing.lateness import Lateness, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher
from lightning_ncclsafe.timing.windows import Clock, Window, joined

_IDLE_S = 30.0
_USER = Frame(file="/train/train.py", line=10, function="training_step", code="step()", user=True)
_IN_TORCH = Frame(file="/site-packages/torch/distributed/distributed_c10d.py", line=3000, function="all_reduce")

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Delay:
    """What was found in some calls of a group: who was late for them, and what they took.

    Attributes:
        rank: The rank that was latest in most of them.
        late_ms: How late that rank was, each call.
        transfer_ms: What the calls themselves took, each; empty where durations are not known.
        waits_ms: How long the ranks waited that waited longest, each call.
    """

    rank: int
    late_ms: list[float]
    transfer_ms: list[float]
    waits_ms: list[float]


def unpickled(dump: dict[str, Any]) -> dict[str, Any]:
    """The pickled form of a rank's recorder, by the way that the package reads it."""
    found: dict[str, Any] = recorders._PlainUnpickler(io.BytesIO(base64.b64decode(dump["pickle"]))).load()
    return found


def parsed(dump: dict[str, Any], recorder: dict[str, Any]) -> tuple[list[Group], list[Collective]]:
    """Groups, with their members, and collectives of one form of a rank's recorder."""
    groups, collectives = flight_recorder.parse(recorder, {})
    return [replace(group, ranks=tuple(dump["groups"].get(group.name, ()))) for group in groups], collectives


def first_finding(file: File) -> Finding | None:
    """The verdict on a recording: the most probable cause, if there is any."""
    works = file["expected"].get("works", [])
    ranks = tuple(_rank_facts(dump, works=dump["rank"] in works) for dump in file["dumps"])
    incident = Incident(
        number=1, kind=IncidentKind.SUSPECT, opened_by=0, idle_s=_IDLE_S, suspect_after_s=20.0, timeout_s=1800.0
    )
    findings = judge(JobFacts(incident=incident, world_size=file["ranks"], ranks=ranks)).findings
    return findings[0] if findings else None


def _rank_facts(dump: dict[str, Any], *, works: bool) -> RankFacts:
    groups, collectives = parsed(dump, dump["json"])
    waits = not works and any(not collective.completed for collective in collectives)
    return RankFacts(
        rank=dump["rank"],
        pid=1000 + dump["rank"],
        progress=Progress(phase=Phase.TRAIN, idle_s=_IDLE_S),
        stack=(_USER, _IN_TORCH) if waits else (_USER,),
        groups=tuple(groups),
        collectives=tuple(collectives),
    )


def compared(file: File) -> list[tuple[MatchedCalls, Lateness]]:
    """Who was late for each call, by group, as the timer finds it."""
    return [(calls, lateness(calls, {})) for calls in Matcher().add(_windows(file))]


def wrong_about_pairs(file: File) -> list[str]:
    """What the timer has wrong about different calls that have completed with each other."""
    matcher = Matcher()
    matcher.add(_windows(file))
    found, expected = matcher.mispairing, file["expected"].get("mispaired")
    sizes = {rank: call.size_bytes for call in found.calls for rank in call.ranks} if found is not None else {}
    told = {"seq": found.seq, "size_bytes": [sizes[rank] for rank in sorted(sizes)]} if found is not None else None
    return [] if told == expected else [f"mispaired are {told}, not {expected}"]


def _windows(file: File) -> Window:
    return joined([_window(dump["rank"], unpickled(dump)["entries"], dump["groups"]) for dump in file["dumps"]])


def _window(rank: int, entries: list[Entry], members: dict[str, list[int]]) -> Window:
    recording = Recording(rank, PhaseHistory(), entries=lambda: [entries])
    # One host, one clock.
    window = recording.read(Clock(uncertainty_ns=0), last=True)
    groups = tuple(replace(group, ranks=tuple(members.get(group.name, ()))) for group in window.groups)
    return replace(window, groups=groups)


def default_group(file: File) -> tuple[MatchedCalls, Lateness]:
    """The calls of the group of all ranks, by their order."""
    return max(compared(file), key=lambda found: (len(found[0].group.ranks), len(found[0].seq)))


def delay(calls: MatchedCalls, late: Lateness, chosen: slice) -> Delay:
    """Who was late for some of a group's calls."""
    late_ns, transfer_ns = late.late_ns[:, chosen], late.transfer_ns[chosen]
    row = int(np.bincount(late_ns.argmax(axis=0), minlength=len(late_ns)).argmax())
    return Delay(
        rank=calls.group.ranks[row],
        late_ms=(late_ns[row] / 1e6).tolist(),
        transfer_ms=(transfer_ns[transfer_ns >= 0] / 1e6).tolist(),
        waits_ms=(late.wait_ns[:, chosen].max(axis=0) / 1e6).tolist(),
    )


def delays(file: File) -> dict[str, Delay]:
    """Of a recording of the scene ``delay``: what is found in its calls, by what was done in them."""
    calls, late = default_group(file)
    healthy, delayed = file["expected"]["healthy"], file["expected"]["late_ms"]
    end = len(calls.seq) - sum(map(len, delayed.values()))
    found = {"healthy": delay(calls, late, slice(end - healthy, end))}
    for name, times in delayed.items():
        found[name] = delay(calls, late, slice(end, end + len(times)))
        end += len(times)
    return found


def wrong_about_delays(file: File) -> list[str]:
    """What the analysis has wrong about a known delay: the rank, its lateness, or what the calls took without it."""
    found, wrong = delays(file), []
    usual_ms = median(found["healthy"].transfer_ms or [0.0])
    for name, measured_ms in file["expected"]["late_ms"].items():
        one, true_ms = found[name], median(measured_ms)
        if one.rank != file["expected"]["late_rank"]:
            wrong.append(f"{name}: rank {one.rank} was late")
        if abs(median(one.late_ms) - true_ms) > 0.2 * true_ms + 10:
            wrong.append(f"{name}: late by {median(one.late_ms):.1f} ms, not {true_ms:.1f} ms")
        # Kernels of ranks that share a GPU take turns; but none of the delay may be taken for transfer.
        if median(one.transfer_ms or [0.0]) > 3 * usual_ms + 0.2 * true_ms:
            wrong.append(f"{name}: transfer {median(one.transfer_ms):.1f} ms, not {usual_ms:.1f} ms as without delay")
    if median(found["healthy"].late_ms) > 0.3 * min(map(median, file["expected"]["late_ms"].values())):
        wrong.append(f"healthy: rank {found['healthy'].rank} was late by {median(found['healthy'].late_ms):.1f} ms")
    return wrong


def wrong(file: File) -> list[str]:
    """All that the package has wrong about a recording."""
    expected, first = file["expected"].get("finding"), first_finding(file)
    told = {"rule": first.rule, "ranks": list(first.ranks)} if first is not None else None
    found = [] if told == expected else [f"first finding {told}, not {expected}"]
    for dump in file["dumps"]:
        if parsed(dump, dump["json"]) != parsed(dump, unpickled(dump)):
            found.append(f"rank {dump['rank']}: its JSON and its pickle say different things")
    found += wrong_about_pairs(file)
    return found + (wrong_about_delays(file) if "late_rank" in file["expected"] else [])
