"""Why a running job hangs: one cause per file or folder."""

from lightning_ncclsafe.rules.kit import WHY_RANKS_WAIT

# Certain causes come first, then the most specific; each rule declares which other one it comes after.
HANG_RULES = WHY_RANKS_WAIT.of(__name__, __path__)
