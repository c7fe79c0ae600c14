"""A rank's machine: what the kernel lets it wait for, memory, storage and GPUs, as conditions and in words."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_ncclsafe.facts import Collective, GpuFacts, HostFacts, ProcessFacts, RankFacts, StorageFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence
from lightning_ncclsafe.facts.wording import duration_words, size_words
from lightning_ncclsafe.rules.kit.rule import named_by, once
from lightning_ncclsafe.rules.kit.timeline import ROOTED, WHY_RANKS_WAIT, GroupView, Timeline


class Wait(Enum):
    """What a process waits for in the kernel."""

    FREEZER = "its control group to be thawed"
    """``docker pause``, or a scheduler that suspends jobs."""
    NETWORK_STORAGE = "storage on a network"
    STORAGE = "storage"
    PIPE = "the other end of a pipe"
    DRIVER = "a device's driver"
    CLOCK = "the clock"
    UNKNOWN = ""


# The first match decides. The names are those of Linux 4 to 6; file systems have prefixes of their own.
_CHANNELS = (
    (Wait.FREEZER, r"__refrigerator|do_freezer_trap|get_signal"),
    (Wait.DRIVER, r"_?nv(?!me)|uvm_|os_acquire|amdgpu|kfd_|rm_"),
    (
        Wait.NETWORK_STORAGE,
        r"nfs|__nfs|rpc_|ll_|cl_sync|cl_lock|ptlrpc|osc_|ldlm|ceph|cifs|smb|wait_for_response|gpfs|mmfs|cxi|fhgfs|beegfs"
        r"|p9_|v9fs|fuse|__fuse|request_wait_answer|afs_|orangefs",
    ),
    (
        Wait.STORAGE,
        r"io_schedule|folio_wait|folio_lock|__folio|wait_on_page|__lock_page|wait_on_bit|__wait_on_b|bit_wait_io|jbd2|ext4"
        r"|xfs|btrfs|f2fs|zfs|txg_|cv_wait|blk_|blkdev|submit_bio|bio_|balance_dirty|wb_wait|filemap|sync_|vfs_|do_fsync"
        r"|percpu_rwsem_wait|sb_start|rq_qos|wbt_|dm_|md_|raid|nvme|scsi|dio_|__blockdev|iomap|do_get_write|read_extent",
    ),
    (Wait.CLOCK, r"hrtimer_nanosleep|do_nanosleep"),
    (Wait.PIPE, r"pipe_|anon_pipe|wait_for_partner|fifo_open"),
)
_COMPILED = tuple((wait, re.compile(names)) for wait, names in _CHANNELS)


def wait_of(channel: str) -> Wait:
    """What a process that sleeps in this kernel function waits for.

    Args:
        channel: Name of the function (``/proc/PID/wchan``); empty where unknown.
    """
    return next((wait for wait, names in _COMPILED if names.match(channel)), Wait.UNKNOWN) if channel else Wait.UNKNOWN


@once
def delayed_by_machine(view: Timeline) -> frozenset[int]:
    """Ranks that, at least likely, lack a core or memory, collect garbage, or wait for storage."""
    rules = (rule for rule in WHY_RANKS_WAIT if rule.is_of_machine)
    return named_by(view, *rules, least=Confidence.LIKELY)


# A host that has read back less than this since the start is not delayed by swapping.
_SWAPPED_IN = 100_000_000
_SCARCE = 0.05
# Share of the time in which all tasks of the host wait for memory, and rate of pages that a rank waits for.
_STALLED = 0.3
_FAULTS_PER_S = 100
GROWS_BYTES_PER_S = 1_000_000
"""A process that does not load data allocates and frees less than this in a second."""

REMEDY_MAPPED_FILE = (
    "A page of a mapped file could not be read or written: the file was cut short or replaced while it was mapped "
    "(np.memmap, torch.load(mmap=True)), its storage failed, or the file system behind it is full, such as /dev/shm. "
    "Write a file anew under another name, and rename it (os.replace): whoever has mapped the old one keeps that."
)
"""What to do about SIGBUS."""
TOO_LITTLE_MEMORY = (
    "This host has too little memory: load the dataset lazily or memory-mapped instead of whole in every rank, use a "
    "smaller batch or fewer loader workers, and keep swap off network storage."
)
"""What to do where a host swaps."""


def swaps(host: HostFacts) -> bool:
    """Whether swapping slows this rank: part of it is swapped out, and that or what the host reads back is large."""
    return bool(host.process_swap_bytes) and (host.process_swap_bytes or 0) + (host.swapped_in_bytes or 0) > _SWAPPED_IN


def waits_for_memory(facts: RankFacts) -> bool:
    """Whether a lack of memory slows this rank: its host stalls on memory, and it swaps or has many page faults."""
    pressure, thread = facts.machine.pressure, facts.machine.main_thread
    if pressure is None or (pressure.memory_stalled or 0.0) < _STALLED:
        return False
    faults = (thread.major_faults or 0) if thread is not None else 0
    return swaps(facts.host_facts) or faults >= _FAULTS_PER_S * pressure.over_s


def short_of_memory(host: HostFacts) -> bool:
    """Whether less than a twentieth of the host's memory, or of the control group's limit, is left."""
    available, total = host.memory_available_bytes, host.memory_total_bytes
    if available is not None and total and available < _SCARCE * total:
        return True
    rss, limit = host.rss_bytes, host.memory_limit_bytes
    return rss is not None and bool(limit) and rss > (1 - _SCARCE) * (limit or 0)


def growth_bytes_per_s(facts: HostFacts | ProcessFacts) -> int:
    """How fast a process grows, including what is swapped out; 0 if it does not grow, or that is unknown."""
    grows = (facts.memory_growth_bytes_per_s or 0) + (facts.swap_growth_bytes_per_s or 0)
    return grows if grows >= GROWS_BYTES_PER_S else 0


def memory_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """Memory and swap of a rank's process and host; nothing if the host does not report them."""
    host = facts.host_facts
    amounts = (
        (host.rss_bytes, "{} resident"),
        (host.process_swap_bytes or None, "{} of it swapped out"),
        (host.memory_available_bytes, "{} of memory available on the host"),
        (host.memory_limit_bytes, "{} is the limit of its control group"),
        (host.swap_used_bytes or None, "{} of swap in use on the host"),
        (host.swapped_in_bytes or None, "{} read back from swap since the start"),
    )
    words = [text.format(size_words(amount)) for amount, text in amounts if amount is not None]
    words[1:1] = [f"growing by {size_words(rate)}/s in all"] if words and (rate := growth_bytes_per_s(host)) else []
    if words:
        yield Evidence(source="host", rank=facts.rank, text=", ".join(words) + ".")


def directories(facts: RankFacts, *, of_checkpoints: bool) -> tuple[StorageFacts, ...]:
    """The directories of checkpoint callbacks, or those of everything else, which is loggers."""
    return tuple(entry for entry in facts.storage if ("Checkpoint" in entry.owner) == of_checkpoints)


def directory_words(entry: StorageFacts) -> str:
    """``"/mnt/logs (nfs4)"``."""
    # A URL is no path of this host, whatever its storage writes to.
    is_known = entry.filesystem and "://" not in entry.path
    return f"{entry.path} ({entry.filesystem})" if is_known else entry.path


def storage_evidence(facts: RankFacts, *, of_checkpoints: bool) -> Iterator[Evidence]:
    """One line per directory: what writes there, and its file system."""
    for entry in directories(facts, of_checkpoints=of_checkpoints):
        text = f"{entry.owner} writes to {directory_words(entry)}."
        yield Evidence(source="storage", rank=facts.rank, text=text)


# Far longer than a collective takes to connect its ranks, far shorter than any sensible suspect_after.
_MOMENT_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective on NCCL that all members of a group have called, and that has not completed on all of them.

    Attributes:
        group: The group.
        calls: What each member has called.
    """

    group: GroupView
    calls: dict[int, Collective]

    @property
    def first(self) -> Collective:
        """The call of a member on which it has not completed."""
        return self.calls[self.pending[0]]

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks on which it has not completed."""
        return tuple(rank for rank, call in sorted(self.calls.items()) if not call.completed)

    @property
    def completed(self) -> tuple[int, ...]:
        """Ranks on which it has completed."""
        return tuple(rank for rank, call in sorted(self.calls.items()) if call.completed)

    @property
    def not_started(self) -> tuple[int, ...]:
        """Ranks whose device has not started it; empty unless it is known to have started on another."""
        begun = [rank for rank, call in self.calls.items() if call.started or call.completed]
        waiting = tuple(rank for rank in self.pending if not self.calls[rank].started)
        return waiting if begun else ()

    @property
    def is_rooted(self) -> bool:
        """Whether it may complete on one rank before it does on the others."""
        op = self.first.op
        is_of_all = op.startswith(("all", "_all", "reduce_scatter", "_reduce_scatter"))
        return not is_of_all and any(word in op for word in ROOTED)


def pending_on_nccl(view: Timeline) -> Iterator[Pending]:
    """Every such collective, without those that a rank has called only just now, as they may complete yet."""
    for group in view.groups:
        calls = view.joined(group)
        on_nccl = all(call.backend.startswith("nccl") for call in calls.values())
        if (
            len(calls) > 1
            and on_nccl
            and not has_just_called(view, calls)
            and any(not call.completed for call in calls.values())
        ):
            yield Pending(group, calls)


def has_just_called(view: Timeline, calls: Mapping[int, Collective]) -> bool:
    """Whether a rank made its call only a moment before its facts were taken: the collective may complete yet."""
    return any(0 < view.facts[rank].taken_ns < call.created_ns + _MOMENT_NS for rank, call in calls.items())


def gpu_of(facts: RankFacts) -> GpuFacts | None:
    """What the driver reports about a rank's GPU."""
    return facts.machine.gpu.gpu if facts.machine.gpu is not None else None


def ailment(facts: RankFacts) -> str:
    """What the driver reports to be wrong with a rank's GPU, in words; empty if nothing."""
    state = facts.machine.gpu
    if state is None:
        return ""
    if state.no_answer_s:
        return f"the driver has not answered for {duration_words(state.no_answer_s)} when asked about it"
    gpu = state.gpu
    if gpu is None:
        return ""
    faults = [f"the kernel's log has Xid {', '.join(gpu.xids)}"] if gpu.xids else []
    faults += [f"NVML wants it to be recovered ({gpu.recovery_action})"] if gpu.recovery_action else []
    faults += [f"{gpu.ecc_errors} uncorrected ECC errors"] if (gpu.ecc_errors or 0) > 0 else []
    faults += ["memory rows wait to be remapped"] if gpu.pending_repair else []
    return "; ".join(faults)


def gpu_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """What a rank's GPU does now, and what is wrong with it."""
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
