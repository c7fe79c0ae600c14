"""Why ranks that present their data could not train together: one cause per file."""

from lightning_ncclsafe.rules.kit import HOW_DATA_DIFFERS

# Causes come before the causes that follow from them.
AGREEMENT_RULES = HOW_DATA_DIFFERS.of(__name__, __path__)
