"""What ranks have found on their hosts that will slow or end the run."""

from lightning_ncclsafe.rules.kit import WHAT_HOSTS_LACK

# The most harmful comes first: what ends the run, what makes it hang, what slows it.
PREFLIGHT_RULES = WHAT_HOSTS_LACK.of(__name__, __path__)
