"""What ranks disagree about before they train: their loaders, data and Trainer settings. Several causes per file.

``loaders.agreement`` asks these rules; ``batches`` also decides which findings the user allows.
"""

from lightning_ncclsafe.rules.kit import HOW_DATA_DIFFERS

# Causes come before the causes that follow from them.
AGREEMENT_RULES = HOW_DATA_DIFFERS.of(__name__, __path__)
