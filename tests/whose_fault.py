"""Whose fault each cause is, written down without a look at what the rules plan. What is in none may be anybody's."""

OF_CODE = {
    "at-breakpoint",
    "crossed-groups",
    "different-trainer-settings",
    "diverged-collectives",
    "diverged-log-keys",
    "mismatched-collective",
    "rank-zero-only-work",
    "skipped-step",
    "stopped-early",
    "uneven-batches",
    "unmatched-p2p",
    "unpresented-loader",
    "unused-parameters",
}
"""Of what ranks hang in."""
OF_DATA = {
    "loader-count",
    "loader-settings",
    "same-shard",
    "sampler-disagreement",
    "sized-and-unsized",
    "unequal-samples",
}
"""Of what ranks compare: wrong code as well, or its settings or data."""
OF_MACHINE = {
    "all-joined",
    "blocked-on-disk",
    "gpu-stuck",
    "host-starved",
    "network-cut",
    "p2p-blocked",
    "slow-checkpoint",
    "slow-logger",
    "slow-name-server",
    "stopped-process",
    "unreachable-host",
    "wrong-interface",
}
OF_EITHER = {"file-lock"}
"""Wrong code where ranks wait for one another, and else anybody's."""
