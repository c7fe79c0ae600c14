"""Why a running job hangs: one cause per file or folder, whose name is that of the cause.

A new file is found by itself. It imports ``rules.kit``, ``facts`` and, for functions of libraries, ``code.libraries``.
"""

from lightning_ncclsafe.rules.kit import WHY_RANKS_WAIT

# Certain causes come first, then the most specific; each rule declares which other one it comes after.
HANG_RULES = WHY_RANKS_WAIT.of(__name__, __path__)
