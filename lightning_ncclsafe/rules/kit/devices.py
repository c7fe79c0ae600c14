"""Questions that rules about GPUs and networks share: who has called what on NCCL, who runs where, who is unwell."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_ncclsafe.facts import Collective, RankFacts
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.timeline import GroupView, Timeline
from lightning_ncclsafe.rules.kit.wording import duration_words

# Far longer than an exchange of messages takes, far shorter than any sensible suspect_after.
_MOMENT_NS = 1_000_000_000
# Here some ranks may be done before others have begun: the root has sent, or not been waited for.
_ROOTED = ("broadcast", "scatter", "gather", "reduce", "send", "recv")
_SYMMETRIC = ("reduce_scatter", "_reduce_scatter")


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective that all members of a group have called on NCCL, and that has not ended on all of them.

    Attributes:
        group: The group.
        calls: What each member has called.
    """

    group: GroupView
    calls: dict[int, Collective]

    @property
    def first(self) -> Collective:
        """What a member that still waits has called."""
        return self.calls[self.pending[0]]

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks on which it has not ended."""
        return tuple(rank for rank, call in sorted(self.calls.items()) if not call.completed)

    @property
    def completed(self) -> tuple[int, ...]:
        """Ranks on which it has ended."""
        return tuple(rank for rank, call in sorted(self.calls.items()) if call.completed)

    @property
    def not_started(self) -> tuple[int, ...]:
        """Ranks whose device has not come to it, where others' have; none where nobody's is known to have."""
        begun = [rank for rank, call in self.calls.items() if call.started or call.completed]
        waiting = tuple(rank for rank in self.pending if not self.calls[rank].started)
        return waiting if begun else ()

    @property
    def is_rooted(self) -> bool:
        """Whether one rank may be done with it before the others are."""
        op = self.first.op
        return not op.startswith(("all_", "_all", "all", *_SYMMETRIC)) and any(word in op for word in _ROOTED)


def pending_on_nccl(view: Timeline) -> Iterator[Pending]:
    """Each such collective; those that a rank has called only just now are left out, as they may end yet."""
    for group in view.groups:
        calls = view.joined(group)
        on_nccl = all(call.backend.startswith("nccl") for call in calls.values())
        just_now = any(_came_just_now(view.facts[rank], call) for rank, call in calls.items())
        if len(calls) > 1 and on_nccl and not just_now and any(not call.completed for call in calls.values()):
            yield Pending(group, calls)


def _came_just_now(facts: RankFacts, call: Collective) -> bool:
    return 0 < facts.taken_ns < call.created_ns + _MOMENT_NS


def uses_gpus(view: Timeline) -> bool:
    """Whether the job has groups on NCCL."""
    return any(entry.backend.startswith("nccl") for facts in view.facts.values() for entry in facts.collectives[-8:])


def ailment(facts: RankFacts) -> str:
    """What its driver says is wrong with a rank's GPU, in words; empty where nothing is known to be."""
    state = facts.machine.gpu
    if state is None:
        return ""
    if state.no_answer_s:
        return f"the driver has not answered for {duration_words(state.no_answer_s)} when asked about it"
    gpu = state.gpu
    if gpu is None:
        return ""
    told = [f"the kernel's log has Xid {', '.join(gpu.xids)}"] if gpu.xids else []
    told += [f"NVML wants it to be recovered ({gpu.recovery_action})"] if gpu.recovery_action else []
    told += [f"{gpu.ecc_errors} uncorrected ECC errors"] if gpu.ecc_errors else []
    told += ["memory rows wait to be remapped"] if gpu.pending_repair else []
    return "; ".join(told)


def gpu_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """What a rank's GPU does at this moment, and what is wrong with it."""
    state = facts.machine.gpu
    if state is None:
        return
    doing = [f"{state.utilization:.0%} busy"] if state.utilization is not None else []
    doing += [f"draws {state.power_w:.0f} W"] if state.power_w is not None else []
    doing += [f"held down by {', '.join(state.gpu.throttled_by)}"] if state.gpu and state.gpu.throttled_by else []
    if doing:
        yield Evidence(source="gpu", rank=facts.rank, text=f"Its GPU is {', '.join(doing)}.")
    if wrong := ailment(facts):
        yield Evidence(source="gpu", rank=facts.rank, text=f"Of its GPU: {wrong}.")
