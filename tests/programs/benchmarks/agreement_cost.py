"""What it costs that ranks compare their data before a stage: in a small job, for long data, for many ranks.

Setup: ranks train one step with stock DDPStrategy and with SafeDDP in turns, in the same processes, and take the time
of ``Strategy.process_dataloader``, where the comparison is made. All wait for each other before it begins: what a rank
waits for one that comes late is not the comparison's. The time is that of the worst rank: the one with the highest
median, the highest maximum. "first" is the first comparison of the processes, which most users never go beyond; it is
not in the other numbers. Mind that 8 ranks share the cores that there are: each waits while others compute.
CPU is what all threads of a rank compute meanwhile, that of rank 0 among them, which has the store as well.

Long data: one process reads the facts of a loader of a Subset with as many indices as a large data set has.

Many ranks: rank 0 finds the messages of all others in an exchange in memory, and does all that follows, up to the
error and its report. Its parts are timed by themselves, too; "all" is no sum of them, but the real thing.

python tests/programs/benchmarks/agreement_cost.py
python tests/programs/benchmarks/agreement_cost.py --only setup --data images --blocks 30
python tests/programs/benchmarks/agreement_cost.py --only ranks --json
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agreement_rank import DATA, Images, subset
from started_ranks import run_ranks
from step_overhead import BLOCK
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from lightning_ncclsafe.errors import DatasetMismatchError
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.exchange.meeting import Contribution, Meeting
from lightning_ncclsafe.facts import (
    DataFacts,
    Incident,
    IncidentKind,
    JobFacts,
    LoaderFacts,
    Phase,
    Progress,
    RankFacts,
    codec,
)
from lightning_ncclsafe.loaders.agreement import Agreement, epoch_ends
from lightning_ncclsafe.probes.data.loaders import loader_facts
from lightning_ncclsafe.probes.data.random_state import random_states
from lightning_ncclsafe.report.folder import write_report
from lightning_ncclsafe.report.tables.data import render_mismatch
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.judging import judge

ONE_RANK = Path(__file__).with_name("agreement_rank.py")
SETUP_MS = 50.0
LONG_MS = 1000.0
MANY_MS = 1000.0
PER_HOST = 8
# A job in which nobody is special: neither rank 0 nor the last one.
DEVIATING = 0.6

WORDS = {
    "tensors": "TensorDataset, 50,000",
    "subset": "Subset, 50,000 indices",
    "images": "ImageFolder, 100,000",
    "table": "Hugging Face, 100,000",
    "shuffled-table": "the same, shuffled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was timed, in milliseconds; None for what there is no number of."""

    group: str
    name: str
    median_ms: float
    max_ms: float
    first_ms: float | None = None
    cpu_ms: float | None = None
    stock_ms: float | None = None
    allowed_ms: float | None = None


def setup_row(data: str, ranks: int, blocks: int) -> Row:
    """The comparison of one small job, from start to end of its processes."""
    times = launch(data, ranks, blocks)
    # The first block warms up the processes. Each block has two trainings of either kind.
    walls, cpus = ([[fit[clock] for fit in rank["safe"]] for rank in times] for clock in ("wall_ms", "cpu_ms"))
    return Row(
        group=f"setup, {ranks} ranks on {os.cpu_count()} cores",
        name=WORDS[data],
        median_ms=max(statistics.median(wall[2:]) for wall in walls),
        max_ms=max(max(wall[2:]) for wall in walls),
        first_ms=max(wall[0] for wall in walls),
        cpu_ms=max(statistics.median(cpu[2:]) for cpu in cpus),
        stock_ms=max(statistics.median(fit["wall_ms"] for fit in rank["stock"][2:]) for rank in times),
        allowed_ms=SETUP_MS,
    )


def launch(data: str, ranks: int, blocks: int) -> list[dict[str, list[dict[str, float]]]]:
    """Runs the trainings on all ranks; what each rank has written down."""
    with tempfile.TemporaryDirectory() as folder:
        times = run_ranks(ONE_RANK, [*BLOCK * (1 + blocks), f"--data={data}"], ranks, folder)
        # A report takes time of its own, and says that the ranks' data were not the same, as they should be.
        if list(Path(folder).glob("ncclsafe/*/report.json")):
            raise SystemExit(f"Ranks disagree. What they have printed:\n{Path(folder, 'output.txt').read_text()}")
        return times


def long_rows(indices: int, repeats: int) -> Iterator[Row]:
    loader = split(subset(indices), 0, 8)
    for content in ("sample", "full"):
        yield timed(
            lambda content=content: facts_of(loader, "train_dataloader", content),  # type: ignore[misc]
            repeats,
            group=f"Subset of {indices:,} indices, one process",
            name=f'content="{content}"',
            # The user has asked for all of them.
            allowed_ms=LONG_MS if content == "sample" else None,
        )


def many_rows(ranks: int, repeats: int) -> Iterator[Row]:
    for name, deviating in (("all equal", ()), ("one deviates", (int(DEVIATING * ranks),))):
        with tempfile.TemporaryDirectory() as folder:
            yield from _many_rows(name, cards(ranks, deviating), Path(folder), repeats)


def _many_rows(name: str, presented: Sequence[Contribution], folder: Path, repeats: int) -> Iterator[Row]:
    messages = [codec.encode(card) for card in presented]
    job = JobFacts(
        incident=Incident(number=1, kind=IncidentKind.DATA, opened_by=0, opened_ns=time.time_ns()),
        world_size=len(messages),
        # Decoded, as rank 0 has them: no two ranks share an object.
        ranks=tuple(codec.decode(Contribution, message).facts for message in messages),
    )
    data = [facts.data for facts in job.ranks if facts.data is not None]
    diagnosis = judge(job, AGREEMENT_RULES)
    parts: dict[str, Callable[[], object]] = {
        "decode": lambda: [codec.decode(Contribution, message) for message in messages],
        "judge": lambda: judge(job, AGREEMENT_RULES),
        "epoch ends": lambda: epoch_ends(data),
    }
    if diagnosis.findings:
        parts["text of the error"] = lambda: render_mismatch(diagnosis)
        parts["report written"] = lambda: write_report(diagnosis, folder)
    group = f"{len(messages):,} ranks, {name}"
    for part, act in parts.items():
        yield timed(act, repeats, group=group, name=part)
    yield timed(lambda: compare(presented, messages, folder), repeats, group=group, name="all", allowed_ms=MANY_MS)


def compare(presented: Sequence[Contribution], messages: Sequence[bytes], folder: Path) -> None:
    """What rank 0 does once all others have presented their loaders."""
    exchange = MemoryExchange()
    for rank, message in enumerate(messages[1:], start=1):
        exchange.set(f"data/{rank}", message)
    data, say = presented[0].facts.data, lambda _: None
    assert data is not None
    agreement = Agreement(
        meeting=Meeting(exchange=exchange, rank=0, world_size=len(messages), deadline_s=60.0, say=say),
        world_size=len(messages),
        identity=replace(presented[0].facts, data=None),
        report_dir=folder,
        say=say,
    )
    with suppress(DatasetMismatchError):
        agreement.compare(data)


def cards(ranks: int, deviating: Sequence[int]) -> list[Contribution]:
    """What each rank presents: two loaders, whose facts are read from real ones."""
    images = Images(10_000)
    loaders = [
        facts_of(split(dataset, 0, ranks), f"train_dataloader[{index}]", "sample")
        for index, dataset in enumerate((Subset(images, range(0, len(images), 2)), images))
    ]
    return [Contribution(number=1, facts=card(rank, ranks, loaders, rank in deviating)) for rank in range(ranks)]


def card(rank: int, ranks: int, loaders: Sequence[LoaderFacts], deviates: bool) -> RankFacts:
    mine = [replace(loader, sampler=replace(loader.sampler, rank=rank)) for loader in loaders if loader.sampler]
    if deviates:
        # Has split the data in a way of its own.
        mine[0] = replace(mine[0], fingerprints=mine[0].fingerprints | {"indices": f"{rank:016x}"})
    data = DataFacts(
        stage="train_dataloader",
        mode="max_size_cycle",
        loaders=tuple(mine),
        val_check_batch=max(loader.batches or 0 for loader in mine),
        data_rank=rank,
        data_ranks=ranks,
        # As nobody has seeded them.
        random=tuple(replace(state, digest=f"{rank:016x}") for state in random_states()),
    )
    return RankFacts(
        rank=rank,
        local_rank=rank % PER_HOST,
        host=f"node-{rank // PER_HOST:03}",
        pid=10_000 + rank,
        progress=Progress(phase=Phase.INIT),
        data=data,
    )


def split(dataset: Dataset[Any], rank: int, ranks: int) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, num_replicas=ranks, rank=rank))


def facts_of(loader: DataLoader[Any], name: str, content: str) -> LoaderFacts:
    return loader_facts(loader, name=name, limit=1.0, content=content)


def timed(act: Callable[[], object], repeats: int, *, group: str, name: str, allowed_ms: float | None = None) -> Row:
    walls, cpus = [], []
    for _ in range(1 + repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
    return Row(
        group=group,
        name=name,
        median_ms=statistics.median(walls[1:]),
        max_ms=max(walls[1:]),
        first_ms=walls[0],
        cpu_ms=statistics.median(cpus[1:]),
        allowed_ms=allowed_ms,
    )


def show(rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    for group in dict.fromkeys(row.group for row in rows):
        table = Table(title=f"{group} (milliseconds)", box=box.SIMPLE, title_justify="left")
        table.add_column("", no_wrap=True)
        for column in ("median", "maximum", "first", "CPU", "stock", "allowed"):
            table.add_column(column, justify="right")
        for row in rows:
            if row.group == group:
                table.add_row(row.name, *cells(row))
        Console().print(table)


def cells(row: Row) -> Iterator[str]:
    for ms in (row.median_ms, row.max_ms, row.first_ms, row.cpu_ms, row.stock_ms):
        yield "" if ms is None else f"{ms:.2f}"
    yield "" if row.allowed_ms is None else f"{row.allowed_ms:g}"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    if "setup" in options.only:
        for data in options.data:
            if "table" not in data or find_spec("datasets"):
                yield setup_row(data, options.ranks, options.blocks)
    if "long" in options.only:
        yield from long_rows(options.indices, options.repeats)
    if "ranks" in options.only:
        yield from many_rows(options.many_ranks, options.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["setup", "long", "ranks"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="what to measure")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="of the setup")
    parser.add_argument("--ranks", type=int, default=8, help="processes of the setup")
    parser.add_argument("--blocks", type=int, default=10, help="of the setup: stock, safe, safe, stock")
    parser.add_argument("--indices", type=int, default=10_000_000, help="of the long data")
    parser.add_argument("--many-ranks", type=int, default=1024, help="whose messages rank 0 judges")
    parser.add_argument("--repeats", type=int, default=9, help="of what one process does")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()
    rows = list(measure(options))
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
