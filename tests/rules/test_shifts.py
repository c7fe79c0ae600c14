"""Calls that only some ranks have made, as the recorder's past knows them: who, which call, at which line."""

from dataclasses import replace

import pytest
from builders import BARRIER, ENGINE, GLOO, MAIN, NCCL, RUN, SITE, USER_FILE, job, user
from call_scenes import RESULT
from effort import calls_in
from judged import first

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.facts import Action, Collective, Frame, JobFacts, LoggedKey, RankFacts, StepFacts
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.probes.process import flight_recorder
from lightning_ncclsafe.rules.hang.diverged_collectives.calls import divergence_location
from lightning_ncclsafe.rules.kit.shifts import shift
from lightning_ncclsafe.rules.kit.timeline import timeline

# Each letter is a call site: its operation, its elements, and the user's line, if it has one.
SITES = {
    "r": ("all_reduce", 9000, 0),  # the gradients
    "b": ("barrier", 0, 0),  # Lightning's
    "g": ("all_gather", 8, 40),
    "h": ("all_gather", 8, 44),
    "i": ("all_gather", 8, 48),
    "s": ("all_reduce", 8, 50),
    "z": ("barrier", 0, 60),
    "y": ("barrier", 0, 64),
    # One call, for which torch has the root go another way.
    "k": ("scatter", 8, 30),
    "c": ("scatter", 8, 30),
    "d": ("scatter", 8, 34),
    # Not so: no rank is the root of it.
    "t": ("all_reduce", 8, 50),
    # Two of Lightning's, from one line of its strategy.
    "p": ("broadcast", 1, 0),
    "q": ("broadcast", 1, 0),
}
ZERO = "if rank == 0:  (line 59)"


def rank(number: int, letters: str, *, world: int = 2, condition: str = "") -> RankFacts:
    """A rank that has called all this, and waits in the last."""
    calls = tuple(_call(letter, seq, condition) for seq, letter in enumerate(letters, 1))
    last = replace(calls[-1], completed=False)
    frame = replace(BARRIER, function=last.op)
    facts = GLOO.rank(number, MAIN, RUN, frame, seq=len(calls), outstanding=1, world=world)
    hook = Action(name="[LightningModule]Net.on_train_batch_end", for_s=23)
    progress = replace(facts.progress, actions=(*facts.progress.actions, hook))
    return replace(facts, collectives=(*calls[:-1], last), progress=progress)


def _call(letter: str, seq: int, condition: str) -> Collective:
    op, size, line = SITES[letter]
    line_of_users = user("step", line, condition=condition if letter == "z" else "")
    return Collective(
        group="0",
        seq=seq,
        op=op,
        backend="gloo",
        completed=True,
        input_sizes=((size,),) if size else (),
        dtypes=("Float",),
        created_ns=1_000_000 * seq,
        site=letter,
        stack=(line_of_users,) if line else (),
    )


def of(*letters: str, condition: str = "") -> JobFacts:
    world = len(letters)
    ranks = (rank(number, text, world=world, condition=condition) for number, text in enumerate(letters))
    return job(*ranks, world=world)


@pytest.mark.parametrize(
    ("letters", "ranks", "line"),
    [
        pytest.param(("rrzb", "rrbr", "rrbr"), (0,), 60, id="one call more"),
        pytest.param(("rgrgrb", "rgrrb", "rgrgrb"), (1,), 40, id="one call fewer"),
        pytest.param(("rggrb", "rggrb", "rrb"), (2,), 40, id="two calls fewer"),
        pytest.param(("rgrgrgr", "rgrgrr", "rgrgrgr"), (1,), 40, id="fewer, and the same follows"),
        pytest.param(("rgrgrg", "rgrgrr", "rgrgrg"), (1,), 40, id="waits where others have gone another way"),
        pytest.param(("rgrgrg", "rgrgrz", "rgrgrg"), (1,), 60, id="waits in what nobody has ever called"),
        pytest.param(("rrz", "rrr", "rrz"), (1,), 60, id="has left out what nobody has ever called before"),
        pytest.param(("g", "b", "g"), (1,), 40, id="is in what is not the user's"),
        pytest.param(("gbhzgbggbgg", "gbhgbggbgg", "gbggbggbgg"), (0,), 60, id="one call more, after a branch"),
        pytest.param(
            ("rgbrbrgbrgb", "rgbrbrgbrgb", "rgbrgbrgbrgb", "rgbrhbrgbrgb", "rgbribrgbrgb"),
            (0, 1),
            40,
            id="one call fewer than most, who make it at three lines",
        ),
    ],
)
def test_the_rank_that_is_out_of_step_is_named_with_the_call(
    letters: tuple[str, ...], ranks: tuple[int, ...], line: int
) -> None:
    finding = first(of(*letters))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", ranks)
    assert finding.location.endswith(f"train.py:{line} in step"), finding


def test_of_two_calls_that_were_made_before_the_usual_one_was_skipped() -> None:
    view = timeline(of("rgsrgsrg", "rgsrgsrs"))
    assert view.divergence is not None
    assert divergence_location(view, view.divergence, (1,)).endswith("train.py:40 in step")
    assert divergence_location(view, view.divergence, (0,)).endswith("train.py:40 in step")


def test_it_is_reported_in_words() -> None:
    more, fewer = first(of("rrzb", "rrbr", "rrbr", condition=ZERO)), first(of("rgrgrb", "rgrrb", "rgrgrb"))
    assert more.summary.startswith(
        "Rank 0 called barrier at train.py:60 in step, under `if rank == 0:` (line 59), which ranks 1-2 did not: "
        "since then they are one call apart. "
    )
    assert fewer.summary.startswith(
        "Rank 1 skipped all_gather (8 elements of Float) at train.py:40 in step, which ranks 0, 2 called: "
        "since then they are one call apart. "
    )


def test_a_call_of_torchmetrics_is_not_looked_for_in_the_users_line() -> None:
    view = timeline(of("rrzb", "rrbr", "rrbr"))
    assert view.divergence is not None
    found = shift(view, view.divergence.group)
    assert found is not None and " to compute a metric" not in found.words()
    gather = Frame(file=f"{SITE}/torchmetrics/utilities/distributed.py", line=9, function="gather_all_tensors")
    of_metric = replace(found, call=replace(found.call, stack=(*found.call.stack, gather)))
    assert of_metric.words().startswith("rank 0 called barrier to compute a metric at train.py:60 in step")


def test_of_two_ranks_a_condition_or_what_all_have_called_before_decides() -> None:
    assert first(of("rrzb", "rrbr", condition=ZERO)).ranks == (0,)
    assert first(of("rgrgrb", "rgrrb")).ranks == (1,)
    assert first(of("rgrgrg", "rgrgrr")).ranks == (1,)
    # Three values are reduced in each step, all at one line; rank 1 has two in the last step.
    fewer = first(of("gggrgggrgggrggg", "gggrgggrgggrggr"))
    assert (fewer.ranks, fewer.location) == ((1,), f"{USER_FILE}:40 in step")
    # The others have come to another number of them before.
    assert first(of("gggrggrgggrggg", "gggrggrgggrggr")).ranks == (0, 1)


def test_a_broadcast_of_a_library_is_not_taken_for_that_of_its_root() -> None:
    found = shift(timeline(of("pgrpgrpgrpgr", "pgrpgrqpgrpg")), "0")
    assert found is not None and (found.ranks, found.call.seq, found.callers) == ((1,), 7, (1,))


def test_what_the_user_calls_now_and_then_in_place_of_a_librarys_call_is_one_call_more() -> None:
    finding = first(of("pgrprprprpg", "pgrprprprpr"))
    assert finding.summary.startswith(
        "Rank 0 called all_gather (8 elements of Float) at train.py:40 in step, which rank 1 did"
    )
    assert (finding.location, finding.confidence) == (f"{USER_FILE}:40 in step", Confidence.LIKELY)


def test_of_two_ranks_habit_alone_makes_nothing_certain() -> None:
    """Rank 1 may have left out the first of a kind of call: that of the first validation."""
    finding = first(of("rgrgrgrgzrgrg", "rgrgrgrgrgrg"))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-collectives", (0,), Confidence.LIKELY)


def test_of_two_ranks_both_are_named_where_nothing_decides() -> None:
    finding = first(of("rrzb", "rrbr"))
    assert (finding.ranks, finding.confidence) == ((0, 1), Confidence.LIKELY)
    assert finding.location.endswith("train.py:60 in step")


def test_a_branch_is_no_difference_although_ranks_come_apart_soon_after_it() -> None:
    """Rank 1 takes the other branch in the second call, and leaves out the barrier after the fourth."""
    finding = first(of("rgrgz", "rhrgr", "rgrgz"))
    assert (finding.ranks, finding.location) == ((1,), f"{USER_FILE}:60 in step")
    assert "skipped barrier" in finding.summary


def test_the_effort_is_proportional_to_the_ranks_whatever_each_calls_later() -> None:
    def calls_of(ranks: int) -> int:
        later = [f"{number:06b}".replace("0", "r").replace("1", "s") * 4 for number in range(ranks // 2)]
        view = timeline(of(*(f"{site}b{text}" for site in "gh" for text in later)))
        view.sequences("0")
        return calls_in(lambda: shift(view, "0"))

    assert calls_of(64) < 6 * calls_of(16)


def test_the_same_call_in_two_branches_is_no_difference() -> None:
    view = timeline(of("rgrzb", "rhrbr", "rhrbr"))
    found = shift(view, "0")
    assert found is not None and (found.ranks, found.call.site) == ((0,), "z")
    assert shift(timeline(of("rgrb", "rhrb", "rgrb")), "0") is None


def test_a_branch_of_some_ranks_does_not_hide_the_call_that_another_has_left_out() -> None:
    """Rank 0 meets the others from a line of its own, and rank 2 passes both lines by."""
    finding = first(of("rryb", "rrzb", "rrbr", "rrzb"))
    assert (finding.ranks, finding.location) == ((2,), f"{USER_FILE}:60 in step")
    assert "skipped barrier at train.py:60 in step or at another line, which ranks 0-1, 3 called" in finding.summary
    assert finding.confidence is Confidence.LIKELY
    assert first(of("rrzb", "rrzb", "rrbr", "rrzb")).confidence is Confidence.CERTAIN


def test_units_of_one_size_that_are_called_from_one_line_twice_hide_no_shift() -> None:
    finding = first(of("rghhrb", "rhhrb", "rghhrb"))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (1,))
    assert finding.location.endswith("train.py:40 in step")
    assert shift(timeline(of("rghhh", "rhhhh", "rghhh")), "0") is None  # a branch would look the same


def test_the_root_of_a_scatter_has_not_made_another_call() -> None:
    """Rank 0 holds what is scattered, twice in a row; later rank 1 leaves out a call."""
    finding = first(of("kkrgrg", "ccrgrr", "ccrgrg"))
    assert (finding.rule, finding.ranks, finding.location) == ("diverged-collectives", (1,), f"{USER_FILE}:40 in step")
    assert shift(timeline(of("kkrgrg", "ccrgrg", "ccrgrg")), "0") is None


@pytest.mark.parametrize(
    ("letters", "ranks"),
    [
        (("kkrgrg", "ddrgrr", "ddrgrg"), (0,)),
        (("kkrgrg", "kkrgrr", "ccrgrg", "ccrgrg", "ccrgrg"), (0, 1)),
        (("ttrgrg", "ssrgrr", "ssrgrg"), (0,)),
    ],
    ids=["another line", "two ranks cannot both be the root", "no root"],
)
def test_what_is_not_the_roots_other_way_is_a_difference(letters: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    found = shift(timeline(of(*letters)), "0")
    assert found is not None and (found.ranks, found.call.seq) == (ranks, 1)


def test_what_fits_both_ways_decides_nothing() -> None:
    assert shift(timeline(of("grgr", "rgrg")), "0") is None


def test_calls_of_unknown_sites_are_not_compared() -> None:
    known, unknown = rank(0, "rgrgrg"), rank(1, "rgrgrr")
    assert shift(timeline(job(known, unknown, world=2)), "0") is not None
    blind = replace(unknown, collectives=(*unknown.collectives[:-1], replace(unknown.collectives[-1], site="")))
    assert shift(timeline(job(known, blind, world=2)), "0") is None


LOGGED = [
    {"filename": f"{SITE}/torch/distributed/distributed_c10d.py", "line": 10, "name": "all_reduce"},
    {"filename": USER_FILE, "line": 52, "name": "training_step"},
    {"filename": f"{SITE}/lightning/pytorch/trainer/trainer.py", "line": 9, "name": "_run"},
]


def on_nccl(
    number: int, letters: str, monkeypatch: pytest.MonkeyPatch, *, frames_of_gradients: bool | None = False
) -> RankFacts:
    """One of three that have reduced two buckets (a, b) and logged values (l), as the recorder knows these calls.

    Args:
        number: The rank.
        letters: What it has called.
        monkeypatch: Replaces the recorder.
        frames_of_gradients: False if no Python function has called those, None if the recorder has lost them.
    """
    sizes = {"a": 9000, "b": 500, "l": 1}
    calls = tuple(
        Collective(
            group="0",
            seq=seq,
            op="all_reduce",
            backend="nccl",
            completed=seq < len(letters),
            input_sizes=((sizes[letter],),),
            dtypes=("Float",),
            created_ns=1_000_000 * seq + number,
        )
        for seq, letter in enumerate(letters, 1)
    )
    entries = [
        {"time_created_ns": call.created_ns, "frames": LOGGED if letter == "l" else []}
        for call, letter in zip(calls, letters, strict=True)
        if letter == "l" or frames_of_gradients is not None
    ]
    monkeypatch.setattr(recorders, "entries", lambda *, stacks: [entries])
    facts = NCCL.rank(number, ENGINE, seq=len(letters), outstanding=1, world=3)
    return replace(facts, collectives=flight_recorder.with_call_sites(calls))


def test_a_value_that_one_rank_reduces_among_gradients_that_no_python_function_reduces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = ("ablabab", "ablablab", "ablabab")
    facts = job(*(on_nccl(number, text, monkeypatch) for number, text in enumerate(letters)), world=3)
    found = shift(timeline(facts), "0")
    assert found is not None
    assert (found.ranks, found.callers, found.others, found.call.seq) == ((1,), (1,), (0, 2), 6)
    assert found.frame is not None and (found.frame.file, found.frame.line) == (USER_FILE, 52)
    finding = first(facts)
    assert (finding.rule, finding.ranks, finding.location) == (
        "diverged-collectives",
        (1,),
        f"{USER_FILE}:52 in training_step",
    )


def test_gradients_that_all_reduce_alike_or_of_unknown_sites_are_no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = job(*(on_nccl(number, "abab", monkeypatch) for number in range(3)), world=3)
    assert shift(timeline(equal), "0") is None
    lost = (on_nccl(number, text, monkeypatch, frames_of_gradients=None) for number, text in enumerate(("lab", "llab")))
    assert shift(timeline(job(*lost, world=2)), "0") is None


def test_the_stack_of_one_call_is_that_of_all_calls_from_its_site() -> None:
    def without_repeats(facts: RankFacts) -> RankFacts:
        newest = {call.site: call.seq for call in facts.collectives}
        calls = (call if newest[call.site] == call.seq else replace(call, stack=()) for call in facts.collectives)
        return replace(facts, collectives=tuple(calls))

    facts = of("rgrgrgrb", "rgrrgrb", "rgrgrgrb")
    finding = first(replace(facts, ranks=tuple(map(without_repeats, facts.ranks))))
    assert (finding.ranks, finding.location.rpartition("/")[2]) == ((1,), "train.py:40 in step")


def test_a_rank_that_joined_early_has_no_other_unmatched_call() -> None:
    join = Frame(file=f"{SITE}/torch/distributed/algorithms/join.py", line=286, function="__exit__")

    def joined(facts: RankFacts, *seqs: int) -> RankFacts:
        calls = (
            replace(call, site=f"j{call.seq}", stack=(user("epoch", 77), join)) if call.seq in seqs else call
            for call in facts.collectives
        )
        return replace(facts, collectives=tuple(calls))

    early = joined(rank(1, "grgrs", world=3), 4, 5)
    found = shift(timeline(job(rank(0, "grgrg", world=3), early, rank(2, "grgrg", world=3), world=3)), "0")
    assert found is not None and (found.ranks, found.call.site, found.others) == ((1,), "g", (1,))
    most = [joined(rank(number, "grgrs", world=3), 4, 5) for number in (0, 1)]
    found = shift(timeline(job(*most, rank(2, "grgrg", world=3), world=3)), "0")
    assert found is not None and (found.ranks, found.callers) == ((0, 1), (2,))
    assert found.frame == user("step", 40)


def test_only_what_all_recorders_still_have_is_compared() -> None:
    whole, overwritten = rank(0, "gbrrzb"), rank(1, "gbrrbr")
    kept = replace(overwritten, collectives=overwritten.collectives[3:])
    found = shift(timeline(job(whole, kept, world=2)), "0")
    assert found is not None and found.call.site == "z"


def test_calls_at_one_line_with_different_sizes_have_one_purpose() -> None:
    own = rank(0, "rrs")
    larger = replace(own.collectives[-1], input_sizes=((9,),))
    other = replace(rank(1, "rrs"), collectives=(*own.collectives[:-1], larger))
    finding = first(job(own, other, world=2))
    assert (finding.rule, finding.confidence) == ("mismatched-collective", Confidence.CERTAIN)


def test_different_sizes_after_a_skipped_call_are_no_mismatch() -> None:
    finding = first(of("rgrgrsr", "rgrgrr", "rgrgrsr"))
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (1,))
    assert finding.location.endswith("train.py:50 in step")


def logging(number: int, letters: str) -> RankFacts:
    """One of three that have all logged a key at z, and may reduce it now."""
    facts, place = rank(number, letters, world=3), f"{USER_FILE}:60 in step"
    is_reducing = letters.endswith("z")
    stack = (MAIN, RUN, user("step", 60), RESULT, BARRIER) if is_reducing else facts.stack
    key = LoggedKey(name="accuracy", hook="training_step", place=place)
    steps = StepFacts(with_backward=3, logged=(key,), reducing=key.name if is_reducing else "")
    return replace(facts, stack=stack, steps=steps)


def test_a_value_that_all_logged_before_and_one_rank_skips_once() -> None:
    finding = first(job(*(logging(n, letters) for n, letters in enumerate(("zrzrz", "zrzrz", "zrzrr"))), world=3))
    assert (finding.rule, finding.ranks, finding.confidence) == ("diverged-log-keys", (2,), Confidence.LIKELY)
    assert finding.location == f"{USER_FILE}:60 in step"
    assert "Ranks 0-1 log 'accuracy' with sync_dist=True in this step" in finding.summary


def test_a_call_that_was_skipped_before_a_value_is_logged_is_the_cause() -> None:
    ranks = (logging(n, letters) for n, letters in enumerate(("gzrgzrg", "gzrgzrg", "gzrgzrz")))
    finding = first(job(*ranks, world=3))
    assert (finding.rule, finding.ranks, finding.location) == (
        "diverged-collectives",
        (2,),
        f"{USER_FILE}:40 in step",
    )


def test_a_barrier_of_one_rank_that_was_paired_with_another_barrier() -> None:
    found = first(of("rgrzb", "rgrb", condition=ZERO))
    assert (found.rule, found.ranks, found.confidence) == ("diverged-collectives", (0,), Confidence.CERTAIN)
    assert ":60 in step" in found.location
    assert "rank 1 did not: since then they are one call apart" in found.summary
