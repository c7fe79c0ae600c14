"""All scenarios: what is wrong, in files by theme, and what is not."""

import faults_agreement
import faults_alone
import faults_calls
import faults_checkpoints
import faults_culprits
import faults_ends
import faults_frozen
import faults_groups
import faults_host
import faults_loaders
import faults_loggers
import faults_network
import faults_start
import faults_steps
import faults_swallowed
import faults_unseen
import healthy_loops
import healthy_starts
import healthy_steps
import thread_data
import thread_data_workers
import thread_eighth
import thread_eighth_healthy
import thread_eighth_process
import thread_fifth
import thread_fifth_healthy
import thread_fifth_process
import thread_fourth
import thread_fourth_healthy
import thread_fourth_process
import thread_healthy_data
import thread_healthy_loops
import thread_healthy_start
import thread_loops
import thread_loops_backward
import thread_loops_groups
import thread_ninth_data
import thread_ninth_healthy_loops
import thread_ninth_steps
import thread_process
import thread_rank_zero
import thread_second
import thread_second_healthy
import thread_second_more
import thread_seventh
import thread_seventh_healthy
import thread_seventh_process
import thread_sixth
import thread_sixth_healthy
import thread_sixth_process
import thread_start
from truths import all_cases

THEMES = (
    faults_agreement,
    faults_alone,
    faults_calls,
    faults_checkpoints,
    faults_culprits,
    faults_ends,
    faults_frozen,
    faults_groups,
    faults_host,
    faults_loaders,
    faults_loggers,
    faults_network,
    faults_start,
    faults_steps,
    faults_swallowed,
    faults_unseen,
    healthy_loops,
    healthy_starts,
    healthy_steps,
    thread_data,
    thread_data_workers,
    thread_eighth,
    thread_eighth_healthy,
    thread_eighth_process,
    thread_fifth,
    thread_fifth_healthy,
    thread_fifth_process,
    thread_fourth,
    thread_fourth_healthy,
    thread_fourth_process,
    thread_healthy_data,
    thread_healthy_start,
    thread_healthy_loops,
    thread_loops,
    thread_loops_backward,
    thread_loops_groups,
    thread_ninth_data,
    thread_ninth_healthy_loops,
    thread_ninth_steps,
    thread_process,
    thread_rank_zero,
    thread_second,
    thread_second_healthy,
    thread_second_more,
    thread_seventh,
    thread_seventh_healthy,
    thread_seventh_process,
    thread_sixth,
    thread_sixth_healthy,
    thread_sixth_process,
    thread_start,
)

CASES = all_cases()
