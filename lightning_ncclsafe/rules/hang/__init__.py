"""Why a running job hangs: one cause per file."""

from lightning_ncclsafe.rules.hang.all_joined import all_joined
from lightning_ncclsafe.rules.hang.at_breakpoint import at_breakpoint
from lightning_ncclsafe.rules.hang.blocked_on_disk import blocked_on_disk
from lightning_ncclsafe.rules.hang.checkpoint_skipped_barrier import checkpoint_skipped_barrier
from lightning_ncclsafe.rules.hang.compile_skew import compile_skew
from lightning_ncclsafe.rules.hang.crossed_groups import crossed_groups
from lightning_ncclsafe.rules.hang.data_stall import data_stall
from lightning_ncclsafe.rules.hang.dead_rank import dead_rank
from lightning_ncclsafe.rules.hang.different_trainer_settings import different_trainer_settings
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
from lightning_ncclsafe.rules.hang.slow_name_server import slow_name_server
from lightning_ncclsafe.rules.hang.stopped_early import stopped_early
from lightning_ncclsafe.rules.hang.stopped_process import stopped_process
from lightning_ncclsafe.rules.hang.timeout_misuse import timeout_misuse
from lightning_ncclsafe.rules.hang.uneven_batches import uneven_batches
from lightning_ncclsafe.rules.hang.unfinished_rank import unfinished_rank
from lightning_ncclsafe.rules.hang.unmatched_p2p import unmatched_p2p
from lightning_ncclsafe.rules.hang.unpresented_loader import unpresented_loader
from lightning_ncclsafe.rules.hang.unreachable_host import unreachable_host
from lightning_ncclsafe.rules.hang.unused_parameters import unused_parameters
from lightning_ncclsafe.rules.hang.worker_died import worker_died
from lightning_ncclsafe.rules.hang.wrong_interface import wrong_interface
from lightning_ncclsafe.rules.kit.rule import Rule

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
    slow_name_server,
    late_at_init,
    unfinished_rank,
    different_trainer_settings,
    stopped_early,
    uneven_batches,
    crossed_groups,
    unmatched_p2p,
    diverged_log_keys,
    diverged_collectives,
    gpu_stuck,
    p2p_blocked,
    all_joined,
    host_starved,
    rank_behind,
)
