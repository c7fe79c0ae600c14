"""The ranks' data side by side, and the text of the exception that is raised when they disagree."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import JobFacts, LoaderFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Severity
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.report.lines import columns, cut, safe, wrapped
from lightning_ncclsafe.rules.kit.data import Differences, JobData, JobLoader, Questions, value_words
from lightning_ncclsafe.rules.kit.parts import grouped

_FEW_LOADERS = 4
_MOST_ANSWERS = 4
_MOST_LINES = 60
_WIDEST_CELL = 72

_MOST_ROWS = 20
_SHOWN = ("batches", "samples", "fingerprint", "sampler")
# May differ between ranks with their own shards.
_OWN = ("samples", "fingerprint")

_SETTINGS = ("seed", "epoch", "shuffle", "drop_last")

_NOTHING = {"none", "unknown", ""}

Row = tuple[str, ...]


def data_table(job: JobFacts) -> Iterator[str]:
    """One table for each loader, or of many only for those in which ranks differ; equal ranks share a row.

    Each column names the ranks that differ from most others. Each rank having its own data is no difference.
    """
    view = JobData(job)
    hosts = {facts.rank: facts.host for facts in job.ranks}
    tables = [(loader, *table_rows(loader, hosts)) for loader in view.loaders]
    if len(tables) > _FEW_LOADERS:
        # A title row and one row for all ranks means no difference. The sort is stable.
        tables.sort(key=lambda table: len(table[1]) <= 2)
    for loader, rows, left_out in tables[:_FEW_LOADERS]:
        yield from _table(loader, rows, left_out)
    if len(tables) > _FEW_LOADERS:
        yield f"… {len(tables) - _FEW_LOADERS:,} more loaders are in report.json"
    if view.silent:
        yield f"{ranks_words(view.silent)}: never presented"


def _table(loader: JobLoader, rows: list[Row], left_out: int) -> Iterator[str]:
    yield safe(loader.name)
    yield from columns(rows, widest=_WIDEST_CELL)
    if left_out:
        yield f"  … {left_out:,} more"


def render_mismatch(diagnosis: Diagnosis) -> str:
    """Why ranks cannot continue with their data: what is wrong, all ranks side by side, and what to do.

    Warnings are written in the same way.
    """
    errors = [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]
    shown = errors or list(diagnosis.findings)
    answers = [
        line
        for finding in shown[:_MOST_ANSWERS]
        for line in wrapped(cut(f"{finding.rule}: {finding.summary}")).splitlines()
    ]
    if len(shown) > _MOST_ANSWERS:
        answers.append(f"… {len(shown) - _MOST_ANSWERS:,} more findings are in the report")
    remedy = [line for finding in shown[:1] for line in wrapped(cut(f"What to do: {finding.remedy}")).splitlines()]
    table = list(data_table(diagnosis.job))
    room = _MOST_LINES - len(answers) - len(remedy) - 1
    if len(table) > room:
        table = [*table[:room], "… the whole table is in the report"]
    return "\n".join([*answers, *table, *remedy])


def table_rows(loader: JobLoader, hosts: dict[int, str]) -> tuple[list[Row], int]:
    """The title row, then one row for equal ranks, the majority first; and how many are left out.

    Args:
        hosts: The host of each rank.
    """
    answers = _answers(loader)
    # Iterable data may have nothing else to show.
    iterated = any(facts.iterable for facts in loader.facts.values())
    titles = [
        title
        for title, groups in answers.items()
        if title in _SHOWN or groups.differ or (title == "dataset" and iterated)
    ]
    alike = _alike(loader, answers, titles)
    deviating = _deviating(loader, answers)
    rows = [
        (
            rank_numbers(ranks),
            host_words({hosts[rank] for rank in ranks}),
            *(_cell(loader, title, cells[title], ranks) for title in titles),
            ", ".join(title for title in titles if _differs(loader, title, ranks[0], deviating)),
        )
        for ranks, cells in alike[:_MOST_ROWS]
    ]
    table = [("rank", "host", *titles, "differs"), *rows]
    # Without columns that are empty on all ranks, as after data of unknown length has ended.
    kept = (column for column in zip(*table, strict=True) if not set(column[1:]) <= _NOTHING)
    return list(zip(*kept, strict=True)), len(alike) - len(rows)


def _answers(loader: JobLoader) -> Differences:
    prints = {rank: _prints(loader, rank) for rank in loader.facts}
    # Unless some ranks have the same ones, which then show who shares data.
    own_prints = not loader.replicated and len({*prints.values()}) == len(prints)
    questions: Questions[LoaderFacts] = {
        "batches": lambda facts: facts.batches if facts.read is None else _read_words(facts),
        "samples": lambda facts: facts.samples,
        "fingerprint": lambda facts: "its own",  # unless some ranks have the same
        "sampler": lambda facts: facts.sampler and replace(facts.sampler, rank=None),
        "loader": lambda facts: facts.loader,
        "dataset": lambda facts: facts.datasets or (facts.dataset,),
        "batch_size": lambda facts: facts.batch_size,
        "drop_last": lambda facts: facts.drop_last,
        "num_workers": lambda facts: facts.num_workers if facts.iterable else None,
        "shards": lambda facts: facts.shards,
    }
    answers = {title: loader.by(ask) for title, ask in questions.items()}
    return answers if own_prints else answers | {"fingerprint": grouped(dict[int, object](prints))}


def _deviating(loader: JobLoader, answers: Differences) -> dict[str, set[int]]:
    deviating = {title: set(groups.deviating) for title, groups in answers.items()}
    ended = {rank for rank, facts in loader.facts.items() if facts.ended}
    # Data that has ended is the problem, even if it has on most ranks.
    return deviating | ({"batches": ended} if ended and len(ended) < len(loader.facts) else {})


def _read_words(facts: LoaderFacts) -> str:
    return f"{facts.read or 0:,}, ended" if facts.ended else f"{facts.read or 0:,} so far"


def _alike(
    loader: JobLoader, answers: Differences, titles: Iterable[str]
) -> list[tuple[tuple[int, ...], dict[str, object]]]:
    cells: dict[int, dict[str, object]] = defaultdict(dict)
    for title in titles:
        for value, ranks in answers[title].parts:
            for rank in ranks:
                cells[rank][title] = value
    rows = grouped({rank: tuple(cells[rank].values()) for rank in loader.facts})
    return [(ranks, cells[ranks[0]]) for _, ranks in rows.parts]


def _prints(loader: JobLoader, rank: int, most: int | None = None) -> tuple[str, ...]:
    own = loader.facts[rank].fingerprints
    # The path of each rank's copy is no difference, and neither is how it has rounded the data.
    prints = {kind: loader.prints(kind)[rank] if kind in loader.kinds else own[kind] for kind in sorted(own)}
    return tuple(f"{kind}:{text[:most]}" for kind, text in prints.items() if kind != "paths" or not loader.replicated)


def _cell(loader: JobLoader, title: str, value: object, ranks: tuple[int, ...]) -> str:
    if title == "sampler":
        return _sampler_words(loader, ranks)
    if title == "fingerprint" and isinstance(value, tuple):
        return " ".join(_prints(loader, ranks[0], most=8)) or "none"
    return f"{value:,}" if title in ("batches", "samples") and isinstance(value, int) else value_words(value)


def _sampler_words(loader: JobLoader, ranks: tuple[int, ...]) -> str:
    """``"DistributedSampler, 0-2 of 4, seed=0"``: its class, the shares of these ranks, its seed and what differs."""
    samplers = {rank: facts.sampler for rank, facts in loader.facts.items() if facts.sampler is not None}
    sampler = samplers.get(ranks[0])
    if sampler is None:
        return "none"
    shares = [share for rank in ranks if (share := samplers[rank].rank) is not None]
    taken = [f"{rank_numbers(shares)} of {sampler.replicas}"] if shares else []
    differ = [name for name in _SETTINGS if len({getattr(other, name) for other in samplers.values()}) > 1]
    settings = {name: getattr(sampler, name) for name in dict.fromkeys(("seed", *differ))}
    listed = [f"{name}={value}" for name, value in settings.items() if value is not None]
    return ", ".join([sampler.name, *taken, *listed])


def _differs(loader: JobLoader, title: str, rank: int, deviating: dict[str, set[int]]) -> bool:
    return rank in deviating.get(title, ()) and (loader.replicated or title not in _OWN)


def rank_numbers(ranks: Iterable[int]) -> str:
    """``"0-2, 5"``; empty if there are none."""
    numbers = tuple(ranks)
    return ranks_words(numbers).partition(" ")[2] if numbers else ""


def host_words(hosts: set[str]) -> str:
    """The name of the host; for several, how many they are."""
    return f"{len(hosts):,} hosts" if len(hosts) > 1 else next(iter(hosts)) or "unknown"
