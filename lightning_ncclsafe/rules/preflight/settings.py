"""How variables of the environment are read, and which the rules about them share."""

from lightning_ncclsafe.facts import PreflightFacts

_OFF = {"", "0", "false", "no", "n", "off"}


def switched_on(facts: PreflightFacts, name: str) -> bool:
    """Whether a variable is set to anything but "off"."""
    return facts.settings.get(name, "").strip().lower() not in _OFF


def value_of(facts: PreflightFacts, name: str) -> str:
    """A variable's value in upper case, as NCCL and torch compare it; empty where it is not set."""
    return facts.settings.get(name, "").strip().upper()
