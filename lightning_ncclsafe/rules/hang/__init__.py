"""Why a running job hangs: one cause per file, and every file in here is one."""

from lightning_ncclsafe.rules.kit import WHY_RANKS_WAIT

# What is known for sure comes first, then what is most specific; each rule says behind which other one it stands.
HANG_RULES = WHY_RANKS_WAIT.of(__name__, __path__)
