"""Causes that dumps and logs show after a run: nobody was asked, and no Python stack was taken."""

from lightning_ncclsafe.rules.hang.gpu_memory_exhausted import gpu_memory_exhausted
from lightning_ncclsafe.rules.hang.shm_exhausted import shm_exhausted
from lightning_ncclsafe.rules.hang.worker_died import worker_died
from lightning_ncclsafe.rules.kit.rule import Rule
from lightning_ncclsafe.rules.recorded.all_joined import all_joined
from lightning_ncclsafe.rules.recorded.crossed_groups import crossed_groups
from lightning_ncclsafe.rules.recorded.dead_rank import dead_rank
from lightning_ncclsafe.rules.recorded.diverged_collectives import diverged_collectives
from lightning_ncclsafe.rules.recorded.failed_rank import failed_rank
from lightning_ncclsafe.rules.recorded.gpu_stuck import gpu_stuck
from lightning_ncclsafe.rules.recorded.host_stuck import host_stuck
from lightning_ncclsafe.rules.recorded.late_at_init import late_at_init
from lightning_ncclsafe.rules.recorded.mismatched_collective import mismatched_collective
from lightning_ncclsafe.rules.recorded.network_cut import network_cut
from lightning_ncclsafe.rules.recorded.no_dump import no_dump
from lightning_ncclsafe.rules.recorded.out_of_step import out_of_step
from lightning_ncclsafe.rules.recorded.rank_behind import rank_behind
from lightning_ncclsafe.rules.recorded.silent_rank import silent_rank
from lightning_ncclsafe.rules.recorded.unmatched_p2p import unmatched_p2p
from lightning_ncclsafe.rules.recorded.watchdog_stuck import watchdog_stuck

# Of dumps and logs that a run has left behind.
RECORDED_RULES: tuple[Rule, ...] = (
    gpu_memory_exhausted,
    shm_exhausted,
    worker_died,
    failed_rank,
    dead_rank,
    mismatched_collective,
    diverged_collectives,
    out_of_step,
    late_at_init,
    watchdog_stuck,
    host_stuck,
    unmatched_p2p,
    crossed_groups,
    gpu_stuck,
    no_dump,
    network_cut,
    silent_rank,
    all_joined,
    rank_behind,
)
