"""Which bucket, FSDP unit, parameter or metric of a model an outstanding collective sends, by its size.

Read when ranks are asked for their facts, off the training thread: nothing is done in a step, and no lock is taken
that a blocked backward pass holds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lightning_ncclsafe._torch import sent_together, tensors
from lightning_ncclsafe.facts import Collective, ModelUnit, UnitKind
from lightning_ncclsafe.rules.kit.purpose import matches

# A report that names more than this explains nothing.
MAX_UNITS = 32
_NAMES_AT_ENDS = 4
# Parts of names that wrappers insert.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"}


def read_units(model: Any, collectives: Iterable[Collective]) -> tuple[ModelUnit, ...]:
    """The parts of the model that the outstanding ones among these collectives send; empty if no size fits.

    Args:
        model: The model as its strategy has wrapped it; None gives nothing.
    """
    # Of equal ones, one.
    outstanding = {
        (entry.op, entry.input_sizes, entry.output_sizes, entry.group): entry
        for entry in collectives
        if not entry.completed and not entry.is_p2p
    }
    if model is None or not outstanding:
        return ()
    found = [unit for unit in all_units(model) if any(matches(unit, entry) for entry in outstanding.values())]
    return tuple(_merged(found))[:MAX_UNITS]


def all_units(model: Any) -> Iterator[ModelUnit]:
    """Every unit of a model, without merging equal sizes. Takes some milliseconds for 1,000 parameters."""
    roots: list[str] = []
    for given, module in model.named_modules():
        name = plain_name(given)
        yield from _buckets(module)
        for sent in sent_together.fsdp_units(module):
            is_root = not any(root in ("", name) or name.startswith(f"{root}.") for root in roots)
            yield _unit(UnitKind.FSDP_UNIT, name, sent, prefix=f"{name}." if name else "", is_root=is_root)
            roots += [name] if is_root else []
        if _is_being_synchronised(module):
            yield ModelUnit(kind=UnitKind.METRIC, name=name, type=type(module).__name__)
    yield from _parameters(model)


def plain_name(name: str) -> str:
    """The name without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _buckets(module: Any) -> Iterator[ModelUnit]:
    for buckets in sent_together.ddp_buckets(module):
        for index, sent in enumerate(buckets):
            yield _unit(UnitKind.DDP_BUCKET, f"{index + 1} of {len(buckets)}", sent)


def _unit(
    kind: UnitKind, name: str, sent: sent_together.SentTogether, *, prefix: str = "", is_root: bool = False
) -> ModelUnit:
    names, ends = sent.parameters, _NAMES_AT_ENDS
    return ModelUnit(
        kind=kind,
        name=name,
        parameters=tuple(plain_name(prefix + n) for n in (*names[:ends], *names[max(len(names) - ends, ends) :])),
        parameter_count=len(names),
        elements=sent.elements,
        shard_elements=sent.shard_elements,
        size_bytes=sent.size_bytes,
        groups=sent.groups,
        is_root=is_root,
    )


def _parameters(model: Any) -> Iterator[ModelUnit]:
    for name, parameter in model.named_parameters():
        size = tensors.spread_size(parameter)
        if size is not None:
            elements, mine = size
            yield ModelUnit(
                kind=UnitKind.PARAMETER,
                name=plain_name(name),
                elements=elements,
                shard_elements=mine,
                parameter_count=1,
            )


def _is_being_synchronised(module: Any) -> bool:
    """Whether torchmetrics holds a copy of the metric's own state, as it does during a sync."""
    return getattr(module, "_cache", None) is not None and getattr(module, "_is_synced", None) is False


def _merged(units: list[ModelUnit]) -> list[ModelUnit]:
    """The units with indistinguishable ones merged, in their order."""
    alike: dict[Any, list[ModelUnit]] = {}
    for unit in units:
        key = (unit.kind, unit.elements, unit.shard_elements, unit.groups, unit.is_root, unit.type)
        # DDP's one bucket of the first step has the name of the only one that there may be later.
        if unit not in alike.setdefault(key, []):
            alike[key].append(unit)
    return [
        replace(first, alike=1 + len(others), last=others[-1].name if others else "")
        for first, *others in alike.values()
    ]
