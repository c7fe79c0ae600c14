"""All scenarios: what is wrong, in files by theme, and what is not."""

import faults_alone
import faults_calls
import faults_checkpoints
import faults_data
import faults_ends
import faults_host
import faults_network
import faults_start
import healthy_starts
import healthy_steps
from truths import all_cases

THEMES = (
    faults_alone,
    faults_calls,
    faults_checkpoints,
    faults_data,
    faults_ends,
    faults_host,
    faults_network,
    faults_start,
    healthy_starts,
    healthy_steps,
)

CASES = all_cases()
