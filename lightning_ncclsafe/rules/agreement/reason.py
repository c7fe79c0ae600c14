"""Why the data of ranks differs, according to their random states, shards and batch sizes."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.rules.kit import Groups, JobData, JobLoader, capitalised, grouped, joined, spread_words

_OWNERS = {"python": "Python's", "numpy": "numpy's", "torch": "torch's"}
_AGREE = "The ranks' global random states agree"
# Classes that hold a selection of samples, PyTorch's and Hugging Face's.
_SELECTIONS = {"Subset", "Dataset"}
_NOT_DRAWN = "No global random state that differs between ranks has been drawn from"


def reason(view: JobData, loader: JobLoader) -> str:
    """Why this loader's data probably differs between ranks, in sentences; empty if there is no evidence."""
    return joined((_parts(loader) or _shards(loader) or _random(view, loader), _tail(loader)))


def _parts(loader: JobLoader) -> str:
    parts = loader.by(lambda facts: facts.datasets)
    return f"The ranks' datasets have different parts: {spread_words(parts)}." if parts.differ else ""


def _shards(loader: JobLoader) -> str:
    shards = loader.by(lambda facts: facts.shards)
    if not shards.differ or any(count is None for count, _ in shards.parts):
        return ""
    return f"The ranks read different numbers of shards: {spread_words(shards)}."


def _tail(loader: JobLoader) -> str:
    """That ranks with shards of their own differ only in the incomplete last batch; else empty."""
    if loader.split:
        return ""
    whole = loader.by(lambda facts: _whole_batches(facts.samples, facts.batch_size, facts.drop_last))
    count = whole.parts[0][0]
    limited = any(facts.length != facts.batches for facts in loader.facts.values())
    return "" if whole.differ or not count or limited else f"With drop_last=True all would have {count:,} batches."


def _whole_batches(samples: int | None, batch_size: int | None, drop_last: bool | None) -> int | None:
    return samples // batch_size if samples and batch_size and drop_last is False else None


def _random(view: JobData, loader: JobLoader) -> str:
    states = dict(_states(view))
    if not states or not _may_be_drawn(loader):
        return ""
    differ = [name for name, groups in states.items() if groups.differ]
    drawn = [name for name in differ if _is_drawn(view, name)]
    if drawn:
        return _drawn_words(drawn, [name for name in states if name not in differ], loader.replicated)
    return f"{_NOT_DRAWN if differ else _AGREE}, so {_source(loader)}."


def _may_be_drawn(loader: JobLoader) -> bool:
    """Whether the data may be a random subset: seeds do not matter for uneven shards and streams."""
    if loader.replicated or "indices" in loader.kinds:
        return True
    return any(name.partition(" ")[0] in _SELECTIONS for facts in loader.facts.values() for name in facts.datasets)


def _states(view: JobData) -> Iterator[tuple[str, Groups[str]]]:
    """Ranks grouped by state, for each generator that all ranks report."""
    digests = {rank: {state.name: state.digest for state in data.random} for rank, data in view.data.items()}
    for name in next(iter(digests.values()), {}):
        if all(name in states for states in digests.values()):
            yield name, grouped({rank: states[name] for rank, states in digests.items()})


def _is_drawn(view: JobData, name: str) -> bool:
    """Whether a generator was used: the states of Python and numpy always differ between unseeded ranks."""
    return any(state.drawn for data in view.data.values() for state in data.random if state.name == name)


def _drawn_words(drawn: list[str], agreeing: list[str], replicated: bool) -> str:
    who = _listed(map(_owner, drawn), "and")
    one = len(drawn) == 1
    agrees = "agrees" if len(agreeing) == 1 else "agree"
    rest = f" ({_listed(map(_owner, agreeing), 'and')} {agrees})" if agreeing else ""
    source = _listed((_owner(name).removesuffix("'s") for name in drawn), "or")
    # Ranks with shards of their own may use random numbers for something else.
    split = "the split was probably drawn" if replicated else "if the data was split at random, then probably"
    return (
        f"{capitalised(who)} random {'state differs' if one else 'states differ'} between ranks and "
        f"{'has' if one else 'have'} been drawn from{rest}: {split} from {source}; call "
        "seed_everything(seed) on all ranks before the data is made."
    )


def _owner(name: str) -> str:
    return _OWNERS.get(name, f"{name}'s")


def _listed(words: Iterable[str], conjunction: str) -> str:
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def _source(loader: JobLoader) -> str:
    """The probable source of a difference that no global generator caused."""
    if loader.samples.differ or _differs(loader, "files"):
        return "a filter or a file list probably depends on the rank or its host"
    return "the split probably came from a separate generator without a common seed (np.random.default_rng())"


def _differs(loader: JobLoader, kind: str) -> bool:
    return kind in loader.kinds and grouped(loader.prints(kind)).differ
