"""All causes by topic, for commands and pages that list or explain them."""

from typing import Any

from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.kit import Rule
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES
from lightning_ncclsafe.rules.recorded import RECORDED_RULES


def causes() -> dict[str, tuple[Rule[Any], ...]]:
    """All rules by topic; each has a name, a summary, sections and a remedy."""
    return {
        "Why ranks wait": HANG_RULES,
        "What recordings show": RECORDED_RULES,
        "What ranks disagree about before they train": AGREEMENT_RULES,
        "What is wrong with hosts before training": PREFLIGHT_RULES,
    }
