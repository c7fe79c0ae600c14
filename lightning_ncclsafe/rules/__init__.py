"""Facts to findings: one cause per file, listed here, and the judge that asks them all.

A rule is a plain function named after its cause; its docstring (Symptom, Cause, Remedy, Cannot see) is what
``ncclsafe explain NAME`` prints.
"""

from collections.abc import Callable, Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.rules.agreement.different_data import different_data
from lightning_ncclsafe.rules.agreement.different_datasets import different_datasets
from lightning_ncclsafe.rules.agreement.different_peers import different_peers
from lightning_ncclsafe.rules.agreement.loader_count import loader_count
from lightning_ncclsafe.rules.agreement.loader_settings import loader_settings
from lightning_ncclsafe.rules.agreement.same_shard import same_shard
from lightning_ncclsafe.rules.agreement.sampler_disagreement import sampler_disagreement
from lightning_ncclsafe.rules.agreement.settings_disagreement import settings_disagreement
from lightning_ncclsafe.rules.agreement.sized_and_unsized import sized_and_unsized
from lightning_ncclsafe.rules.agreement.unequal_batches import unequal_batches
from lightning_ncclsafe.rules.agreement.unequal_samples import unequal_samples
from lightning_ncclsafe.rules.agreement.uneven_end import uneven_end
from lightning_ncclsafe.rules.agreement.unpresented_loader import unpresented_loader as silent_at_comparison
from lightning_ncclsafe.rules.agreement.unreadable_loader import unreadable_loader
from lightning_ncclsafe.rules.agreement.validation_step import validation_step
from lightning_ncclsafe.rules.hang.all_joined import all_joined
from lightning_ncclsafe.rules.hang.at_breakpoint import at_breakpoint
from lightning_ncclsafe.rules.hang.blocked_on_disk import blocked_on_disk
from lightning_ncclsafe.rules.hang.checkpoint_skipped_barrier import checkpoint_skipped_barrier
from lightning_ncclsafe.rules.hang.compile_skew import compile_skew
from lightning_ncclsafe.rules.hang.crossed_groups import crossed_groups
from lightning_ncclsafe.rules.hang.data_stall import data_stall
from lightning_ncclsafe.rules.hang.dead_rank import dead_rank
from lightning_ncclsafe.rules.hang.diverged_collectives import diverged_collectives
from lightning_ncclsafe.rules.hang.diverged_log_keys import diverged_log_keys
from lightning_ncclsafe.rules.hang.exception_during_save import exception_during_save
from lightning_ncclsafe.rules.hang.failed_rank import failed_rank
from lightning_ncclsafe.rules.hang.frozen_rank import frozen_rank
from lightning_ncclsafe.rules.hang.gc_pause import gc_pause
from lightning_ncclsafe.rules.hang.gil_held import gil_held
from lightning_ncclsafe.rules.hang.gpu_memory_exhausted import gpu_memory_exhausted
from lightning_ncclsafe.rules.hang.gpu_stuck import gpu_stuck
from lightning_ncclsafe.rules.hang.host_starved import host_starved
from lightning_ncclsafe.rules.hang.late_at_init import late_at_init
from lightning_ncclsafe.rules.hang.mismatched_collective import mismatched_collective
from lightning_ncclsafe.rules.hang.network_cut import network_cut
from lightning_ncclsafe.rules.hang.own_code import own_code
from lightning_ncclsafe.rules.hang.p2p_blocked import p2p_blocked
from lightning_ncclsafe.rules.hang.rank_behind import rank_behind
from lightning_ncclsafe.rules.hang.rank_zero_only_work import rank_zero_only_work
from lightning_ncclsafe.rules.hang.shm_exhausted import shm_exhausted
from lightning_ncclsafe.rules.hang.skipped_step import skipped_step
from lightning_ncclsafe.rules.hang.slow_checkpoint import slow_checkpoint
from lightning_ncclsafe.rules.hang.slow_logger import slow_logger
from lightning_ncclsafe.rules.hang.stopped_process import stopped_process
from lightning_ncclsafe.rules.hang.timeout_misuse import timeout_misuse
from lightning_ncclsafe.rules.hang.uneven_batches import uneven_batches
from lightning_ncclsafe.rules.hang.unfinished_rank import unfinished_rank
from lightning_ncclsafe.rules.hang.unpresented_loader import unpresented_loader
from lightning_ncclsafe.rules.hang.unreachable_host import unreachable_host
from lightning_ncclsafe.rules.hang.unused_parameters import unused_parameters
from lightning_ncclsafe.rules.hang.worker_died import worker_died
from lightning_ncclsafe.rules.hang.wrong_interface import wrong_interface
from lightning_ncclsafe.rules.past_lateness import with_past_lateness
from lightning_ncclsafe.rules.places import with_places
from lightning_ncclsafe.rules.preflight.clocks_apart import clocks_apart
from lightning_ncclsafe.rules.preflight.cores_mismatch import cores_mismatch
from lightning_ncclsafe.rules.preflight.different_settings import different_settings
from lightning_ncclsafe.rules.preflight.different_versions import different_versions
from lightning_ncclsafe.rules.preflight.full_directory import full_directory
from lightning_ncclsafe.rules.preflight.gpu_memory_short import gpu_memory_short
from lightning_ncclsafe.rules.preflight.gpu_shared import gpu_shared
from lightning_ncclsafe.rules.preflight.gpu_unhealthy import gpu_unhealthy
from lightning_ncclsafe.rules.preflight.harmful_settings import harmful_settings
from lightning_ncclsafe.rules.preflight.host_under_pressure import host_under_pressure
from lightning_ncclsafe.rules.preflight.ignored_settings import ignored_settings
from lightning_ncclsafe.rules.preflight.memory_short import memory_short
from lightning_ncclsafe.rules.preflight.shm_too_small import shm_too_small
from lightning_ncclsafe.rules.preflight.silent_at_preflight import silent_at_preflight
from lightning_ncclsafe.rules.preflight.slow_directory import slow_directory
from lightning_ncclsafe.rules.preflight.socket_fallback import socket_fallback
from lightning_ncclsafe.rules.preflight.swap_in_use import swap_in_use
from lightning_ncclsafe.rules.preflight.swap_on_network import swap_on_network
from lightning_ncclsafe.rules.preflight.too_few_open_files import too_few_open_files
from lightning_ncclsafe.rules.preflight.too_many_workers import too_many_workers
from lightning_ncclsafe.rules.preflight.unreachable_interface import unreachable_interface
from lightning_ncclsafe.rules.preflight.unusable_directory import unusable_directory
from lightning_ncclsafe.rules.recorded.all_joined import all_joined as recorded_all_joined
from lightning_ncclsafe.rules.recorded.dead_rank import dead_rank as recorded_dead_rank
from lightning_ncclsafe.rules.recorded.diverged_collectives import diverged_collectives as recorded_divergence
from lightning_ncclsafe.rules.recorded.failed_rank import failed_rank as recorded_failed_rank
from lightning_ncclsafe.rules.recorded.host_stuck import host_stuck
from lightning_ncclsafe.rules.recorded.late_at_init import late_at_init as recorded_late_at_init
from lightning_ncclsafe.rules.recorded.mismatched_collective import mismatched_collective as recorded_mismatch
from lightning_ncclsafe.rules.recorded.no_dump import no_dump
from lightning_ncclsafe.rules.recorded.out_of_step import out_of_step
from lightning_ncclsafe.rules.recorded.rank_behind import rank_behind as recorded_rank_behind
from lightning_ncclsafe.rules.recorded.silent_rank import silent_rank
from lightning_ncclsafe.rules.recorded.unmatched_p2p import unmatched_p2p
from lightning_ncclsafe.rules.recorded.watchdog_stuck import watchdog_stuck
from lightning_ncclsafe.rules.timeline import forget
from lightning_ncclsafe.rules.unknowns import unknowns

Rule = Callable[[JobFacts], Iterable[Finding]]

# Between findings of equal confidence the earlier rule comes first: what is known for sure, then what is most specific.
HANG_RULES: tuple[Rule, ...] = (
    gpu_memory_exhausted,
    shm_exhausted,
    worker_died,
    exception_during_save,
    skipped_step,
    unused_parameters,
    timeout_misuse,
    failed_rank,
    mismatched_collective,
    unreachable_host,
    network_cut,
    dead_rank,
    stopped_process,
    gc_pause,
    gil_held,
    wrong_interface,
    frozen_rank,
    unpresented_loader,
    own_code,
    at_breakpoint,
    checkpoint_skipped_barrier,
    compile_skew,
    rank_zero_only_work,
    slow_logger,
    slow_checkpoint,
    data_stall,
    blocked_on_disk,
    late_at_init,
    unfinished_rank,
    uneven_batches,
    crossed_groups,
    diverged_log_keys,
    diverged_collectives,
    gpu_stuck,
    p2p_blocked,
    all_joined,
    host_starved,
    rank_behind,
)

# Of presented data; what other findings follow from comes before these.
AGREEMENT_RULES: tuple[Rule, ...] = (
    uneven_end,
    loader_count,
    silent_at_comparison,
    sized_and_unsized,
    different_datasets,
    unequal_samples,
    different_data,
    different_peers,
    sampler_disagreement,
    loader_settings,
    validation_step,
    unequal_batches,
    settings_disagreement,
    same_shard,
    unreadable_loader,
)

# Of what ranks have found on their hosts, the most harmful first: what ends the run, what lets it hang, what slows it.
PREFLIGHT_RULES: tuple[Rule, ...] = (
    unusable_directory,
    gpu_memory_short,
    shm_too_small,
    memory_short,
    different_versions,
    too_many_workers,
    silent_at_preflight,
    unreachable_interface,
    swap_on_network,
    swap_in_use,
    gpu_unhealthy,
    gpu_shared,
    different_settings,
    socket_fallback,
    cores_mismatch,
    full_directory,
    too_few_open_files,
    host_under_pressure,
    harmful_settings,
    ignored_settings,
    slow_directory,
    clocks_apart,
)

# Causes that are read from an exception, so that it need not be told twice.
_OF_EXCEPTIONS = (
    "gpu-memory-exhausted",
    "shm-exhausted",
    "worker-died",
    "exception-during-save",
    "skipped-step",
    "unused-parameters",
    "timeout-misuse",
    "diverged-collectives",
)
# What follows from a cause that is known by its own name; where that is only possible, both are told.
_FOLLOWS_FROM = {
    "diverged-collectives": (
        "checkpoint-skipped-barrier",
        "crossed-groups",
        "diverged-log-keys",
        "mismatched-collective",
        "skipped-step",
        "unused-parameters",
    ),
    "uneven-batches": ("skipped-step", "unused-parameters"),
}
# Of dumps and logs that a run has left behind.
RECORDED_RULES: tuple[Rule, ...] = (
    gpu_memory_exhausted,
    shm_exhausted,
    worker_died,
    recorded_failed_rank,
    recorded_dead_rank,
    recorded_mismatch,
    recorded_divergence,
    out_of_step,
    recorded_late_at_init,
    watchdog_stuck,
    host_stuck,
    unmatched_p2p,
    crossed_groups,
    gpu_stuck,
    no_dump,
    silent_rank,
    recorded_all_joined,
    recorded_rank_behind,
)

_CONFIDENCES = tuple(Confidence)


def name_of(rule: Rule) -> str:
    """The rule's public name, which is that of its cause: ``"rank-zero-only-work"``."""
    return getattr(rule, "__name__", "rule").replace("_", "-")


def judge(job: JobFacts, rules: tuple[Rule, ...] = HANG_RULES) -> Diagnosis:
    """Asks every rule and puts the most probable cause first.

    A rule that fails never hides the answers of the others: it is named in ``unanswered``.

    Args:
        job: The facts of all ranks that answered.
        rules: The rules to ask.
    """
    findings: list[Finding] = []
    failures: list[str] = []
    for rule in rules:
        try:
            findings.extend(rule(job))
        except Exception as error:  # a report with one cause less is better than none
            failures.append(f"The rule {name_of(rule)} failed ({type(error).__name__}: {error}).")
    missing = unknowns(job)
    forget()
    told = with_places(with_past_lateness(_ordered(findings), job), job)
    return Diagnosis(job=job, findings=tuple(told), unanswered=(*missing, *failures))


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    kept = [finding for finding in findings if not _superseded(finding, findings)]
    return tuple(sorted(kept, key=lambda finding: _CONFIDENCES.index(finding.confidence)))


def _names_cause(finding: Finding, of: str) -> bool:
    return finding.rule in _FOLLOWS_FROM[of] and _is_likely(finding)


def _is_likely(finding: Finding) -> bool:
    return finding.confidence is not Confidence.POSSIBLE


def _superseded(finding: Finding, findings: list[Finding]) -> bool:
    """That a rank is behind is no news once a cause names this rank, or explains why nobody stands out.

    Nor is an exception, once it has been told what it says.
    """
    if finding.rule == "failed-rank":
        told = {rank for other in findings if other.rule in _OF_EXCEPTIONS for rank in other.ranks}
        return bool(finding.ranks) and told.issuperset(finding.ranks)
    if finding.rule in _FOLLOWS_FROM:
        return any(_names_cause(other, finding.rule) for other in findings)
    if finding.rule == "dead-rank":
        likely = (other for other in findings if other.rule == "mismatched-collective" and _is_likely(other))
        return any(set(other.ranks) >= set(finding.ranks) for other in likely)
    if finding.rule != "rank-behind":
        return False
    # Why ranks gave up waiting does not tell for whom they waited.
    better = [other for other in findings if other.rule not in ("rank-behind", "timeout-misuse")]
    if not better:
        return False
    covered = {rank for other in better for rank in other.ranks}
    return not finding.ranks or covered.issuperset(finding.ranks) or finding.confidence is Confidence.POSSIBLE
