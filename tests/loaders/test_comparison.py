"""How ranks that are threads compare what they present: one verdict for all, whatever becomes of one of them."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.errors import DatasetMismatchError, UnevenDataError
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory, meeting
from lightning_ncclsafe.exchange.meeting import Meeting
from lightning_ncclsafe.facts import DataFacts, EpochEnd, LoaderFacts, Phase, Progress, RankFacts, SamplerFacts
from lightning_ncclsafe.loaders import agreement as module
from lightning_ncclsafe.loaders.agreement import Agreement
from lightning_ncclsafe.loaders.lockstep import BatchesRead
from lightning_ncclsafe.report import folder as report_folder
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.json import read_report

EQUAL = LoaderFacts(name="train_dataloader", length=4, batches=4)
STREAM = LoaderFacts(name="train_dataloader", iterable=True)


def data(*loaders: LoaderFacts, **more: Any) -> DataFacts:
    return DataFacts(stage="train_dataloader", loaders=loaders, **more)


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment only, and where that is too short it is said."""
    monkeypatch.setattr(report_folder, "write_page", lambda *_: "")


class Job:
    """Ranks that compare; ``run`` calls one function in each."""

    def __init__(self, folder: Path, world_size: int, deadline_s: float = 20.0, through: Any = MemoryExchange) -> None:
        self.shared = SharedMemory()
        self.exchanges = [through(self.shared) for _ in range(world_size)]
        self.said: list[str] = []
        self.folder = folder
        self.incidents = [IncidentNumbers() for _ in range(world_size)]
        self.agreements = [self.agreement(rank, world_size, deadline_s) for rank in range(world_size)]

    def agreement(self, rank: int, world_size: int, deadline_s: float) -> Agreement:
        exchange = self.exchanges[rank]
        say = self.said.append
        return Agreement(
            meeting=Meeting(exchange=exchange, rank=rank, world_size=world_size, deadline_s=deadline_s, say=say),
            world_size=world_size,
            identity=RankFacts(rank=rank, host=f"node-{rank}", progress=Progress(phase=Phase.INIT)),
            report_dir=self.folder,
            incidents=self.incidents[rank],
            say=say,
        )

    def run(self, body: Callable[[int, Agreement], Any], ranks: Iterable[int] = ()) -> list[Any]:
        def one(rank: int) -> Any:
            try:
                return body(rank, self.agreements[rank])
            except Exception as error:
                return error

        chosen = list(ranks) or range(len(self.agreements))
        with ThreadPoolExecutor(len(self.agreements)) as pool:
            return list(pool.map(one, chosen))

    def compare(self, *presented: DataFacts, ranks: Iterable[int] = ()) -> list[Any]:
        own = [replace(data, data_rank=rank, data_ranks=len(presented)) for rank, data in enumerate(presented)]
        return self.run(lambda rank, agreement: agreement.compare(own[rank]), ranks)


def test_agreeing_ranks_get_epoch_ends_and_write_no_report(tmp_path: Path) -> None:
    job = Job(tmp_path / "reports", 4)
    assert job.compare(*[data(EQUAL, STREAM)] * 4) == [(EpochEnd(), EpochEnd(votes=True))] * 4
    assert job.said == []
    assert not (tmp_path / "reports").exists()


def test_all_ranks_get_the_same_verdict_and_one_report(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    errors = job.compare(data(EQUAL), data(replace(EQUAL, length=5, batches=5)), data(EQUAL))
    assert {type(error) for error in errors} == {DatasetMismatchError}
    (text,) = {str(error) for error in errors}
    for part in ("4 batches on ranks 0, 2 but 5 batches on rank 1", "node-1", "differs", "What to do: "):
        assert part in " ".join(text.split())
    assert [finding.rule for finding in errors[2].findings] == ["uneven-batches"]
    (path,) = tmp_path.glob("*/report.json")
    report = read_report(path.read_bytes())
    assert report.findings[0].ranks == (1,)
    assert report.job.ranks[1].data == data(replace(EQUAL, length=5, batches=5), data_rank=1, data_ranks=3)
    assert f"The report is in {path.parent}" in text
    assert job.said == [f"report: {path.parent}"], "the rank whose error has it may be ended before it prints that"


OF_COUNT, OF_DATA = "/work/data.py:3 in __len__", "/work/train.py:12 in rows"


@pytest.mark.parametrize(
    ("lines", "location", "words"),
    [
        ({(1,): OF_COUNT, (): OF_DATA}, OF_COUNT, "How much of this data a rank has is decided"),
        ({(): OF_DATA}, OF_DATA, "This data is made"),
    ],
)
def test_the_line_of_the_data_is_asked_for_once_ranks_disagree(
    lines: dict[tuple[int, ...], str], location: str, words: str, tmp_path: Path
) -> None:
    """First the one that decides how many batches the uneven loader has, then the one that makes the data."""
    asked: list[tuple[int, tuple[int, ...]]] = []

    def compare(rank: int, agreement: Agreement, *lengths: int) -> Any:
        def line_at(indices: tuple[int, ...]) -> str:
            asked.append((rank, indices))
            return lines.get(indices, "")

        own = replace(EQUAL, length=lengths[rank], batches=lengths[rank])
        return agreement.compare(data(EQUAL, own, data_rank=rank, data_ranks=2, mode="max_size"), line_at)

    job = Job(tmp_path, 2)
    assert job.run(lambda rank, agreement: compare(rank, agreement, 4, 4)) == [(EpochEnd(), EpochEnd())] * 2
    assert asked == []
    for error in job.run(lambda rank, agreement: compare(rank, agreement, 4, 5)):
        assert error.findings[0].location == location
        assert f"{words} at {location.partition('/work/')[2]}." in " ".join(str(error).split())
    assert asked == [(0, (1,)), (0, ())][: 1 if (1,) in lines else 2]


SET = "/work/train.py:29 in before_fit"


@pytest.mark.parametrize("by_loaders", [False, True])
def test_the_line_of_settings_that_differ_is_asked_for(by_loaders: bool, tmp_path: Path) -> None:
    """But not where validation begins elsewhere only because the loaders differ."""
    asked: list[list[str]] = []

    def compare(rank: int, agreement: Agreement) -> Any:
        def set_at(names: Iterable[str]) -> str:
            asked.append([*names])
            return SET

        loader = replace(EQUAL, length=4 + rank, batches=4 + rank) if by_loaders else EQUAL
        own = replace(data(loader, data_rank=rank, data_ranks=2), val_check_batch=2 + rank)
        return agreement.compare(own, set_at=set_at)

    for error in Job(tmp_path, 2).run(compare):
        (finding,) = error.findings
        told = "This value is set at train.py:29 in before_fit." in finding.summary
        assert (finding.rule, finding.location, told) == (
            ("uneven-batches", "", False) if by_loaders else ("different-trainer-settings", SET, True)
        )
    assert asked == ([] if by_loaders else [["val_check_interval"]])


def test_settings_that_differ_are_not_made_by_data(tmp_path: Path) -> None:
    presented = [data(EQUAL, content=content, data_rank=rank) for rank, content in enumerate(("auto", "off"))]
    job = Job(tmp_path, 2)
    errors = job.run(lambda rank, agreement: agreement.compare(presented[rank], lambda _: OF_DATA))
    for error in errors:
        assert (error.findings[0].rule, error.findings[0].location) == ("settings-disagreement", "")


def test_comparisons_reuse_their_keys(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)

    def many(rank: int, agreement: Agreement) -> int:
        return sum(len(agreement.compare(data(EQUAL))) for _ in range(40))

    first = Job(tmp_path, 3)
    first.run(lambda rank, agreement: agreement.compare(data(EQUAL)))
    assert job.run(many) == [40] * 3
    kept, of_one = (sum(map(len, one.shared.values.values())) for one in (job, first))
    assert kept < 1.5 * of_one, "keys that were read are removed"
    assert {*job.shared.values} == {"data/0", "data/1", "data/2", "data/verdict/40"}


def test_a_disagreement_in_a_later_comparison_is_found(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.compare(data(EQUAL), data(EQUAL))
    errors = job.compare(data(EQUAL), data(STREAM))
    assert [error.findings[0].rule for error in errors] == ["sized-and-unsized"] * 2
    assert Path(errors[0].report_folder).name.endswith("Z-incident-1"), "regardless of the number of comparisons"


def test_training_continues_if_the_user_wants_a_warning(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    longer = replace(EQUAL, length=6, batches=6)
    for _ in range(2):
        ends = job.compare(data(EQUAL, on_mismatch="warn"), data(longer, on_mismatch="warn"))
        assert ends == [(EpochEnd(length=5, ends_at=4, lengths=(4, 6)),)] * 2
    (said,) = job.said
    assert said.startswith("uneven-batches: ")
    assert "report: " in said
    (report,) = tmp_path.glob("*/report.json")
    assert report.parent.name.endswith("Z-incident-1")
    assert [numbers.last for numbers in job.incidents] == [1, 1], "on the rank that does not report as well"


def test_changing_differences_are_reported_once(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for number in range(30):
        longer = replace(EQUAL, length=6 + number, batches=6 + number)
        job.compare(data(EQUAL, on_mismatch="warn"), data(longer, on_mismatch="warn"))
    assert len(job.said) == len(list(tmp_path.glob("*/report.json"))) == 1


OTHER_DATA = replace(
    EQUAL,
    samples=8,
    sampler=SamplerFacts(name="DistributedSampler", replicas=2, rank=0, shuffle=False),
    fingerprints={"values": "a"},
)


def two_halves(rank: int, number: int, **changes: Any) -> LoaderFacts:
    """What a sampler splits among two ranks, and is not the same on them."""
    assert OTHER_DATA.sampler is not None
    sampler = replace(OTHER_DATA.sampler, rank=rank)
    return replace(OTHER_DATA, sampler=sampler, fingerprints={"values": f"{rank} of {number}"}, **changes)


def test_without_the_callback_other_data_is_only_reported(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for epoch in range(3):  # made anew for each
        presented = [data(two_halves(rank, epoch), on_mismatch="raise_on_hang") for rank in range(2)]
        assert job.compare(*presented) == [(EpochEnd(),)] * 2
    (said,) = job.said
    assert said.startswith("different-data: ")
    assert "fingerprint" in said and "values:" in said, "the table"
    assert 'Training continues; DatasetAgreement(on_mismatch="raise") would refuse to start.' in said
    assert not list(tmp_path.glob("*/report.json")), "nothing hangs: no incident"
    validation = [
        replace(data(two_halves(rank, 9, name="val_dataloader"), on_mismatch="raise_on_hang"), stage="val_dataloader")
        for rank in range(2)
    ]
    job.compare(*validation)
    assert len(job.said) == 2


def test_with_the_callback_other_data_raises_with_a_remedy(tmp_path: Path) -> None:
    errors = Job(tmp_path, 2).compare(*(data(two_halves(rank, 0)) for rank in range(2)))
    assert {type(error) for error in errors} == {DatasetMismatchError}
    way = 'To train anyway: Trainer(callbacks=[DatasetAgreement(on_mismatch="warn")]).'
    for error in errors:
        assert way in " ".join(str(error).split())
        assert error.findings[0].remedy.endswith(way)
    (path,) = tmp_path.glob("*/report.json")
    assert read_report(path.read_bytes()).findings[0].remedy.endswith(way)


def test_data_that_would_hang_raises_even_without_the_callback(tmp_path: Path) -> None:
    longer = replace(EQUAL, length=6, batches=6)
    errors = Job(tmp_path, 2).compare(*(data(its, on_mismatch="raise_on_hang") for its in (EQUAL, longer)))
    assert [error.findings[0].rule for error in errors] == ["uneven-batches"] * 2
    assert 'DatasetAgreement(on_mismatch="warn", on_uneven="stop_together")' in " ".join(str(errors[0]).split())


def test_evaluating_everything_on_every_rank_prints_nothing(tmp_path: Path) -> None:
    whole = replace(
        EQUAL,
        name="val_dataloader",
        sampler=SamplerFacts(name="SequentialSampler", order="sequential"),
        fingerprints={"values": "a"},
    )
    job = Job(tmp_path / "reports", 2)
    assert job.compare(*[replace(data(whole), stage="val_dataloader")] * 2) == [(EpochEnd(),)] * 2
    assert job.said == []
    assert not (tmp_path / "reports").exists()


def test_unusable_data_always_raises(tmp_path: Path) -> None:
    warned = [data(EQUAL, on_mismatch="warn"), data(EQUAL, EQUAL, on_mismatch="warn")]
    assert [error.findings[0].rule for error in Job(tmp_path, 2).compare(*warned)] == ["loader-count"] * 2


def test_all_ranks_raise_if_one_wants_an_error(tmp_path: Path) -> None:
    errors = Job(tmp_path, 2).compare(data(EQUAL, on_mismatch="warn"), data(STREAM, on_mismatch="raise"))
    assert {type(error) for error in errors} == {DatasetMismatchError}


@pytest.mark.parametrize("withdrawn", [0, 1])
def test_a_withdrawn_rank_does_not_block_the_others(tmp_path: Path, withdrawn: int) -> None:
    job = Job(tmp_path, 3)
    others = tuple({0, 1, 2} - {withdrawn})
    assert job.compare(data(EQUAL), data(EQUAL), data(EQUAL)) == [(EpochEnd(),)] * 3
    job.run(lambda rank, agreement: agreement.withdraw(), ranks=(withdrawn,))
    for _ in range(3):
        assert job.compare(data(EQUAL), data(STREAM), data(STREAM), ranks=others) == [(), ()]
    assert job.said == []


@pytest.mark.parametrize(("can", "all_can"), [((True, True, True), True), ((True, False, True), False)])
def test_all_can_is_true_only_if_every_rank_can(tmp_path: Path, can: tuple[bool, ...], all_can: bool) -> None:
    job = Job(tmp_path, 3)
    assert job.run(lambda rank, agreement: agreement.all_can(can[rank])) == [all_can] * 3


def test_a_missing_rank_is_named_after_the_deadline(tmp_path: Path) -> None:
    """A rank that can never arrive is normally ended by its guard; here, the guard has failed."""
    job = Job(tmp_path, 3, deadline_s=0.3)
    assert job.compare(data(EQUAL), data(EQUAL), data(STREAM), ranks=(0, 2)) == [(), ()]
    (said,) = job.said
    assert "unpresented-loader: Rank 1 never presented its train_dataloader" in said
    assert len(list(tmp_path.glob("*/report.json"))) == 1


def test_a_late_rank_finds_the_verdict(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, deadline_s=0.2)
    assert job.compare(data(EQUAL), data(EQUAL), ranks=(0,)) == [()]
    assert job.compare(data(EQUAL), data(EQUAL), ranks=(1,)) == [()]
    assert job.compare(data(EQUAL), data(EQUAL)) == [(EpochEnd(),)] * 2


def test_a_missing_rank_0_does_not_block_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_VERDICT_S", 0.1)
    monkeypatch.setattr(meeting, "_ABSENT_S", 0.1)
    job = Job(tmp_path, 3, deadline_s=0.2)
    assert job.compare(*[data(EQUAL)] * 3, ranks=(1, 2)) == [(), ()]
    (said,) = job.said  # one of them for both
    assert (
        said[len("rank 1: ") :]
        == "rank 0 did not compare the ranks' data within 0.2 s; continuing without the comparison"
    )
    assert job.compare(data(STREAM), data(EQUAL), data(EQUAL), ranks=(0,)) == [()], "the verdict the others follow"


def test_a_rank_that_missed_a_comparison_does_not_delay_the_next(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, deadline_s=0.3)
    job.compare(data(EQUAL), data(EQUAL), ranks=(0,))
    job.agreements[0]._meeting._deadline_s = 60
    assert job.compare(data(EQUAL), data(EQUAL), ranks=(0,)) == [()]


def test_a_failure_on_rank_0_releases_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "epoch_ends", lambda ranks: 1 / 0)
    outcome = Job(tmp_path, 3).compare(*[data(EQUAL)] * 3)
    assert isinstance(outcome[0], ZeroDivisionError)
    assert outcome[1:] == [(), ()]


def test_a_missed_deadline_is_retried(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, through=Moody)
    assert job.compare(data(EQUAL), data(EQUAL)) == [(EpochEnd(),)] * 2


class Moody:
    """Answers every third time."""

    lost = ""

    def __init__(self, shared: SharedMemory) -> None:
        self._exchange = MemoryExchange(shared)
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._asked += 1
            if self._asked % 3:
                raise ExchangeError("its host did not answer within 2 s")
            return getattr(self._exchange, name)(*args)

        return call


def test_a_lost_exchange_ends_the_comparison_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.exchanges[1].close()
    (error,) = job.compare(data(EQUAL), data(EQUAL), ranks=(1,))
    assert isinstance(error, ExchangeError)


def test_an_unwritable_folder_does_not_hide_the_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    errors = Job(blocked, 2).compare(data(EQUAL), data(STREAM))
    assert {str(error).splitlines()[0][:18] for error in errors} == {"sized-and-unsized:"}


def test_an_uneven_end_has_one_message_on_all_ranks_and_one_report(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    readings = [
        BatchesRead(batches=9, ended=False),
        BatchesRead(batches=8, ended=True),
        BatchesRead(batches=9, ended=False),
    ]
    presented = data(STREAM, on_uneven="raise")
    errors = job.run(lambda rank, agreement: agreement.uneven(presented, STREAM, readings))
    assert {type(error) for error in errors} == {UnevenDataError}
    assert len({str(error).partition("\nThe report is in ")[0] for error in errors}) == 1
    assert "has ended on rank 1 after 8 batches, while ranks 0, 2 have had 9" in " ".join(str(errors[0]).split())
    (path,) = tmp_path.glob("*/report.json")
    assert job.said == [f"report: {path.parent}"]


@pytest.mark.parametrize(("places", "is_told"), [((5, 5), True), ((5, 6), False), ((5, 0), False)])
def test_an_uneven_end_has_the_line_that_all_ranks_know(tmp_path: Path, places: tuple[int, ...], is_told: bool) -> None:
    readings = [BatchesRead(batches=9 - rank, ended=bool(rank), place=place) for rank, place in enumerate(places)]
    presented, line = data(STREAM, on_uneven="raise"), "/home/me/train.py:8 in __iter__"
    errors = Job(tmp_path, 2).run(lambda rank, agreement: agreement.uneven(presented, STREAM, readings, line))
    for error in errors:
        assert isinstance(error, UnevenDataError)
        (finding,) = error.findings
        assert finding.location == (line if is_told else "")
        assert ("is decided at train.py:8 in __iter__." in finding.summary) == is_told


@pytest.mark.parametrize("on_uneven", ["stop_together", "repeat"])
def test_an_allowed_uneven_end_is_printed_once(tmp_path: Path, on_uneven: str) -> None:
    job = Job(tmp_path, 2)
    readings = [BatchesRead(batches=3, ended=True), BatchesRead(batches=4, ended=False)]
    presented = data(STREAM, on_uneven=on_uneven)
    for _ in range(3):
        job.run(lambda rank, agreement: agreement.uneven(presented, STREAM, readings))
    (said,) = job.said
    assert said.startswith("uneven-batches: The train_dataloader has ended on rank 0 after 3 batches")


class Gathered:
    """Votes of which only the gathering counts."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows = list(rows)

    def start(self, flags: int) -> Callable[[], int]:
        raise AssertionError("nobody votes here")

    def gather(self, *values: int) -> list[list[int]]:
        return self.rows


def first_batches(folder: Path, *rows: list[int], **settings: Any) -> list[Any]:
    votes, presented = Gathered(*rows), data(STREAM, data_ranks=len(rows), **settings)
    job = Job(folder, len(rows))
    return job.run(lambda rank, agreement: agreement.first_batches(presented, STREAM, votes, *rows[rank][1:]))


def test_ranks_with_equal_first_batches_are_named_by_all(tmp_path: Path) -> None:
    errors = first_batches(tmp_path, [0, 11, 12], [1, 21, 22], [2, 11, 12])
    assert {type(error) for error in errors} == {DatasetMismatchError}
    assert {error.findings[0].ranks for error in errors} == {(0, 2)}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(([0, 11, 12], [1, 21, 22]), id="different"),
        pytest.param(([0, 11, 12], [1, 11, 22]), id="only the first batches are equal"),
        pytest.param(([0, 11, 11], [1, 11, 11]), id="synthetic identical batches"),
        pytest.param(([0, 0, 12], [1, 0, 12]), id="no digest"),
        pytest.param(([0, 11, 12], [0, 11, 12]), id="equal tensor-parallel peers"),
    ],
)
def test_inconclusive_first_batches_are_ignored(tmp_path: Path, rows: tuple[list[int], ...]) -> None:
    assert first_batches(tmp_path, *rows) == [None] * 2


@pytest.mark.parametrize("on_mismatch", ["warn", "raise_on_hang"])
def test_equal_first_batches_are_only_a_warning_on_request(tmp_path: Path, on_mismatch: str) -> None:
    assert first_batches(tmp_path, [0, 1, 2], [1, 1, 2], on_mismatch=on_mismatch) == [None] * 2


def test_equal_streams_are_not_advised_to_use_a_sampler(tmp_path: Path) -> None:
    error, _ = first_batches(tmp_path, [0, 1, 2], [1, 1, 2])
    text = " ".join(str(error).split())
    assert "DistributedSampler" not in text
    assert "depends on the rank" in text and 'DatasetAgreement(on_mismatch="warn")' in text
