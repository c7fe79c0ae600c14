"""How many passes each rank has made in a batch, compared between ranks."""

from collections import Counter
from typing import NamedTuple

from lightning_ncclsafe.facts import StepFacts
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import ranks_words

_MADE = ("backward passes", "backward passes that reduce nothing")
# What an automatic optimization makes of a batch, if its optimizer does not ask for the loss again.
_USUAL = 1
# Among so many batches before one it is looked for how they take turns.
_TURNS = 64


class Made(NamedTuple):
    """One batch, as a rank has made it.

    Attributes:
        counts: Backward passes, those that reduce nothing, and the steps of each optimizer.
        is_over: Whether that is all of it.
        called: Where its backward passes were called, as far as that is known.
    """

    counts: tuple[int, ...] = ()
    is_over: bool = False
    called: tuple[str, ...] = ()

    def of(self, kind: int) -> int:
        """How many of a kind."""
        return self.counts[kind] if kind < len(self.counts) else 0


class OtherCounts(NamedTuple):
    """What ranks have made in different numbers.

    Attributes:
        batch: Epoch and index of the batch.
        kind: Of what: backward passes, those that reduce nothing, steps of the first optimizer, ….
        made: What each rank has made in it; without ranks that may make more.
        before: What each of them had made in the batch before, or where batches have taken turns in the one that this
            one is like, as far as that is known.
    """

    batch: tuple[int, ...]
    kind: int
    made: dict[int, Made]
    before: dict[int, Made]

    @property
    def is_accumulation(self) -> bool:
        """Whether ranks have gone through passes without exchanging their gradients, as while these accumulate."""
        return self.kind == 1

    @property
    def are_exchanged(self) -> bool:
        """Whether ranks need one another for it: not for an optimizer's step."""
        return self.kind < len(_MADE)

    @property
    def what(self) -> str:
        """``"backward passes"``."""
        return f"steps of optimizer {self.kind - len(_MADE)}" if not self.are_exchanged else _MADE[self.kind]

    @property
    def at(self) -> str:
        """``"batch 3 of epoch 0"``."""
        return f"batch {self.batch[1]} of epoch {self.batch[0]}"

    @property
    def words(self) -> str:
        """``"1 on rank 1, 2 on ranks 0, 2"``."""
        return ", ".join(f"{count} on {ranks_words(who)}" for count, who in sorted(self._by_count().items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The few; of as many those that have made another number than in the batch before, if others have not.

        Else those that made fewer; all of them where each has asked for the loss as often as it liked.
        """
        by_count = self._by_count()
        few = min(by_count, key=lambda count: (len(by_count[count]), count))
        if len({len(who) for who in by_count.values()}) > 1:
            return tuple(by_count[few])
        if self._is_searched:
            return tuple(sorted(self.made))
        odd = tuple(rank for rank, made in self.before.items() if made.of(self.kind) != self.made[rank].of(self.kind))
        if odd and len(self.before) == len(self.made) and len(odd) < len(self.made):
            return odd
        return tuple(by_count[few])

    @property
    def is_more(self) -> bool:
        """Whether these have not left out anything, but made something that others have not."""
        least = min(self._by_count())
        is_more = any(self.made[rank].of(self.kind) > least for rank in self.ranks)
        return self.kind == 0 and (is_more or self._is_searched)

    @property
    def location(self) -> str:
        """Where they have made what the others have not; a line that they call again is of theirs, too."""
        usual = Counter[str]()
        for rank, made in (*self.made.items(), *self.before.items()):
            if rank not in self.ranks or made is not self.made[rank]:
                usual |= Counter(made.called)
        own = (place for rank in self.ranks for place in Counter(self.made[rank].called) - usual)
        return next(filter(None, own), "")

    @property
    def left_out(self) -> str:
        """The call that these have left out, where another rank has made it; empty where that is not known."""
        few = self.made[self.ranks[0]]
        own = (*few.called, *[""] * (few.of(self.kind) - len(few.called)))
        for made in self.made.values():
            if made.of(self.kind) > len(own) and len(made.called) > len(own):
                pairs = zip(made.called, (*own, ""), strict=False)
                return next(place for place, mine in pairs if place != mine)
        return ""

    @property
    def called_at(self) -> str:
        """The only line from which all have called their passes in this batch; empty if there are several, or none."""
        places = {place for made in self.made.values() for place in made.called}
        are_known = all(len(made.called) == made.of(0) for made in self.made.values())
        return next(iter(places)) if len(places) == 1 and are_known else ""

    @property
    def _is_searched(self) -> bool:
        """Whether an optimizer may have asked for the loss as often as its search took: all have several passes."""
        are_by_hand = any(made.called[:1] not in ((), ("",)) for made in self.made.values())
        return self.kind == 0 and min(self._by_count()) > _USUAL and not are_by_hand

    def _by_count(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, made in self.made.items():
            found.setdefault(made.of(self.kind), []).append(rank)
        return found


@once
def other_counts(view: Timeline) -> OtherCounts | None:
    """The first batch in which ranks have made different numbers of something, and of what first."""
    steps = {facts.rank: facts.steps for facts in sorted(view.job.ranks, key=lambda facts: facts.rank)}
    if len(steps) < 2 or not all(known.passes or known.under_way for known in steps.values()):
        return None
    since = max((known.passes or (known.under_way,))[0][:2] for known in steps.values())
    changes = {run[:2] for known in steps.values() for run in known.passes} | {since}
    changes |= {known.under_way[:2] for known in steps.values() if known.under_way}
    for batch in sorted(change for change in changes if change >= since):
        made = {rank: _made_in(known, batch) for rank, known in steps.items()}
        for kind in range(max(len(one.counts) for one in made.values())):
            if told := _told(made, kind):
                like = _batch_alike(steps[next(iter(told))], batch)
                before = {rank: found for rank in told if (found := _made_before(steps[rank], like)) is not None}
                return OtherCounts(batch, kind, told, before)
        if not all(one.is_over for one in made.values()):
            return None
    return None


def _told(made: dict[int, Made], kind: int) -> dict[int, Made]:
    """Ranks that have made fewer than others and will not make more, and what the others have made; or nothing."""
    if kind == 1 and (told := _exchanged_fewer(made)):
        return told
    most = max(one.of(kind) for one in made.values())
    begun = [one for one in made.values() if one.of(kind) == most]
    final = {rank for rank, one in made.items() if one.is_over or (kind == 0 and _has_stepped(one, begun))}
    if not any(made[rank].of(kind) < most for rank in final):
        return {}
    told = {rank: one for rank, one in made.items() if rank in final or one.of(kind) == most}
    # Ranks do not need one another for a pass more of which they exchange nothing.
    is_alone = kind < len(_MADE) and len({one.of(0) - one.of(1) for one in told.values()}) == 1
    return {} if is_alone else told


def _exchanged_fewer(made: dict[int, Made]) -> dict[int, Made]:
    """The same of passes whose gradients are reduced: who is still in one of these will not make it another one."""
    reduced = {rank: one.of(0) - one.of(1) for rank, one in made.items()}
    most = max(reduced.values())
    final = [rank for rank, one in made.items() if one.is_over]
    if not any(reduced[rank] < most and made[rank].of(1) for rank in final):
        return {}
    return {rank: one for rank, one in made.items() if rank in final or reduced[rank] == most}


def _has_stepped(one: Made, begun: list[Made]) -> bool:
    """Whether it has made its optimizers' step after fewer passes than those that have made none yet."""
    return sum(one.counts[len(_MADE) :]) > 0 and all(sum(other.counts[len(_MADE) :]) == 0 for other in begun)


def _made_in(steps: StepFacts, batch: tuple[int, ...]) -> Made:
    if batch > (steps.passes_epoch, steps.passes_batch):
        is_this = steps.under_way[:2] == batch
        return Made(steps.under_way[2:], called=_called(steps, len(steps.passes))) if is_this else Made()
    found = [index for index, run in enumerate(steps.passes) if run[:2] <= batch]
    return Made(steps.passes[found[-1]][2:], True, _called(steps, found[-1])) if found else Made(is_over=True)


def _batch_alike(steps: StepFacts, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The batch of this epoch that should be as this one is, as all before it have taken turns; else the one before."""
    epoch, index = batch
    counts = [_run_of(steps, (epoch, number))[2:] for number in range(max(index - _TURNS, 0), index)]
    turns = range(1, len(counts) // 2 + 1)
    turn = next((turn for turn in turns if counts[turn:] == counts[:-turn]), 1)
    return epoch, index - turn


def _run_of(steps: StepFacts, batch: tuple[int, ...]) -> tuple[int, ...]:
    return next((run for run in reversed(steps.passes) if run[:2] <= batch), ())


def _made_before(steps: StepFacts, batch: tuple[int, ...]) -> Made | None:
    found = [index for index, run in enumerate(steps.passes) if run[:2] <= batch]
    return Made(steps.passes[found[-1]][2:], True, _called(steps, found[-1])) if found else None


def _called(steps: StepFacts, index: int) -> tuple[str, ...]:
    """From where the passes of a run were called; of long ago, from where all later ones with the same numbers were."""
    known = steps.passes_from[index] if index < len(steps.passes_from) else ()
    if known or index >= len(steps.passes):
        return known
    alike = {
        places
        for run, places in zip(steps.passes, steps.passes_from, strict=False)
        if places and run[2:] == steps.passes[index][2:]
    }
    return alike.pop() if len(alike) == 1 else ()
