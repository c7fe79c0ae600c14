"""Finds parameters that DDP complains about, and the line of user code that skips them or makes them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_ncclsafe.probes.trainer.source_lines import BEFORE_TRAINING, HookSource, sources_in

# DDP numbers the parameters that required a gradient when it was created.
_NO_GRADIENT = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")
_OTHER_SIZE = re.compile(r"params\[(\d+)\] in this process with sizes")
# Lightning divides a loss by the number of batches that accumulate, and a precision may scale it.
_MOST_OPERATIONS = 4
# From a line that uses a part of the model outwards, to the hook.
_MOST_CALLERS = 3
_USUAL = {"forward": 0, "training_step": 1}


def trained_parameters(module: Any) -> list[str]:
    """The parameters that require a gradient."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def named_by_ddp(error: str, trained: Sequence[str]) -> list[str]:
    """The parameters without a gradient according to an error of DDP.

    Args:
        trained: The ones that required a gradient when DDP was created.
    """
    named = _NO_GRADIENT.search(error)
    numbers = map(int, named[1].split()) if named else ()
    return [trained[number] for number in numbers if number < len(trained)]


def of_other_size(error: str, module: Any) -> str:
    """The parameter of a module that has another size than on rank 0, according to an error of DDP; else empty."""
    named = _OTHER_SIZE.search(error)
    names = trained_parameters(module) if named is not None and module is not None else []
    return names[int(named[1])] if named is not None and int(named[1]) < len(names) else ""


def made_at(module: Any, parameter: str) -> str:
    """The line of user code that sets the innermost part of the model with a parameter; empty if unknown."""
    owners, parts = [module], parameter.split(".")
    for part in parts[:-1]:
        owners.append(getattr(owners[-1], part, None))
    inside_out = [*zip(owners, parts, strict=True)][::-1]
    places = (place for owner, part in inside_out for source in sources_in([owner]) for place in source.sets([part]))
    return next(places, "")


def without_gradient(module: Any) -> list[str]:
    """Trained parameters without a gradient; empty if none has one, as after ``zero_grad``."""
    if module is None:
        return []
    wanted = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    missing = [name for name, parameter in wanted if parameter.grad is None]
    return missing if len(missing) < len(wanted) else []


def is_from_nothing(loss: Any, module: Any) -> bool:
    """Whether the graph of a loss leads, in a few operations, only to a tensor that is not a parameter."""
    node = getattr(loss, "grad_fn", None)
    if node is None:
        return loss is not None
    for _ in range(_MOST_OPERATIONS):
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            return False
        node = before[0]
        if (leaf := getattr(node, "variable", None)) is not None:
            return all(leaf is not parameter for parameter in module.parameters())
    return False


def left_out_at(module: Any, missing: list[str]) -> str:
    """The line of user code that skips, or else uses, the largest unused part with the first of these parameters.

    If it is used without gradients, that of the ``with`` statement which switches them off; if what it returns is not
    used, the line that leaves that out.
    """
    names = trained_parameters(module)
    parts = missing[0].split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    whole = (part for part in prefixes if all(name in missing for name in names if name.startswith(f"{part}.")))
    depth = len(next(whole, missing[0]).split("."))
    # Outwards to the user code that calls this part; code called there may still skip its components.
    used = next(filter(None, (_use_of(module, parts, level) for level in range(depth - 1, -1, -1))), None)
    if used is not None and used.without_gradients_at:
        return used.without_gradients_at
    within = (_use_of(module, parts, level) for level in range(depth, len(parts)))
    skipped = next((use for use in (used, *within) if use is not None and use.leads_around), None)
    if skipped is None and used is not None:
        used = skipped = used.of_output()
    if skipped is not None and len(skipped.leads_around) == 1 and not skipped.conditions_around:
        return skipped.leads_around[0]
    return used.place if used is not None else ""


class _Use(NamedTuple):
    """A line that uses a part of the model: in which function, as which attribute."""

    source: HookSource
    line: int
    part: str
    without_gradients_at: str

    @property
    def place(self) -> str:
        return self.source.place(self.line)

    @property
    def leads_around(self) -> tuple[str, ...]:
        """The lines that may skip it."""
        return self.source.leads_around(self.line)

    @property
    def conditions_around(self) -> tuple[str, ...]:
        return self.source.conditions_around(self.line)

    def of_output(self) -> "_Use":
        """The use of what the part has returned, if something may skip every one of these; else this one."""
        line = self.source.uses_of_output(self.line, self.part)
        return self._replace(line=line) if line else self


def _use_of(module: Any, parts: list[str], level: int) -> _Use | None:
    """Where the user code of a module uses one of its parts: calls it, or else names it.

    If nothing leads around that line in a function, where that function is called, if a jump does there.
    """
    for name in parts[:level]:
        module = getattr(module, name, None)
    functions = _functions_of(module)
    sources = [source for source in functions if source.uses(parts[level])]
    for source in sorted(sources, key=lambda source: not source.calls(parts[level])):
        line = source.uses(parts[level])
        off = source.place(source.switches_gradients_off(line))
        return _Use(*_decided_in(source, line, functions), parts[level], off)
    return None


def _decided_in(source: HookSource, line: int, functions: Sequence[HookSource]) -> tuple[HookSource, int]:
    """The function that jumps around a line: that of the line, or the only one that calls it; and its line.

    A condition around the call is no jump: what it leaves out is told at the line itself.

    Args:
        source: The function of the line.
        line: The line.
        functions: Those of the object and its bases, in which methods that override others come before these.
    """
    decides, at = source, line
    for _ in range(_MOST_CALLERS):
        if decides.leads_around(at):
            break
        overriding = [one for one in functions if one.name == decides.name]
        if above := overriding[: overriding.index(decides)]:
            calls = [(above[-1], call) for call in above[-1].calls_on("super", decides.name)]
        else:
            calls = [(one, call) for one in functions for call in one.calls_on("self", decides.name)]
        if len(calls) != 1:
            break
        ((decides, at),) = calls
    is_jump = decides.leads_around(at) and not decides.conditions_around(at)
    return (decides, at) if is_jump else (source, line)


def _functions_of(part: Any) -> list[HookSource]:
    """The functions that run in a step, the usual ones first; of those that others override, those that these call."""
    reached: dict[str, list[HookSource]] = {}
    for source in sources_in([part]):
        overriding = reached.setdefault(source.name, [])
        if not overriding or overriding[-1].calls_on("super", source.name):
            overriding.append(source)
    in_steps = (source for name, each in reached.items() if name not in BEFORE_TRAINING for source in each)
    return sorted(in_steps, key=lambda source: _USUAL.get(source.name, len(_USUAL)))
