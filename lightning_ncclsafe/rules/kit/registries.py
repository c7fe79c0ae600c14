"""The registries of rules, one for each kind, and the decorators that declare a rule."""

from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.kit.data import JobData
from lightning_ncclsafe.rules.kit.hosts import JobHosts
from lightning_ncclsafe.rules.kit.rule import Rules, named_by, once
from lightning_ncclsafe.rules.kit.timeline import Timeline

WHY_RANKS_WAIT = Rules(Timeline)
WHAT_WAS_RECORDED = Rules(Timeline)
HOW_DATA_DIFFERS = Rules(JobData)
WHAT_HOSTS_LACK = Rules(JobHosts)

hang_rule = WHY_RANKS_WAIT.rule
recorded_rule = WHAT_WAS_RECORDED.rule
agreement_rule = HOW_DATA_DIFFERS.rule
preflight_rule = WHAT_HOSTS_LACK.rule


@once
def delayed_by_machine(view: Timeline) -> frozenset[int]:
    """Ranks that at least likely lack a core or memory, collect garbage, or wait for storage."""
    rules = (rule for rule in WHY_RANKS_WAIT if rule.is_of_machine)
    return named_by(view, *rules, least=Confidence.LIKELY)
