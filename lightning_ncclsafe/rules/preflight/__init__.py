"""What is wrong with hosts before training: it will slow, hang or end the run. Several causes per file, by subject.

``preflight.check`` asks these rules; ``problem`` is how the problems of single ranks and hosts become one finding.
"""

from lightning_ncclsafe.rules.kit import WHAT_HOSTS_LACK

# The most harmful comes first: what ends the run, what makes it hang, what slows it.
PREFLIGHT_RULES = WHAT_HOSTS_LACK.of(__name__, __path__)
