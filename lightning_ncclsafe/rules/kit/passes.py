"""How many backward passes and optimizer steps ranks have made in each batch, compared between ranks."""

from collections import Counter
from typing import NamedTuple

from lightning_ncclsafe.facts import StepFacts
from lightning_ncclsafe.facts.wording import apart_words, ranks_words
from lightning_ncclsafe.rules.kit.frames import has_passed, inside_trainer, user_frames
from lightning_ncclsafe.rules.kit.parts import ranks_by
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline

_MADE = ("backward passes", "backward passes that reduce nothing")
# Backward passes per batch with automatic optimization, unless the optimizer evaluates the loss again.
_USUAL_PASSES = 1
# The number of earlier batches that are searched for a recurring pattern.
_TURNS = 64


class BatchCounts(NamedTuple):
    """How many backward passes and optimizer steps a rank has made in one batch.

    Attributes:
        counts: Backward passes, those that reduce nothing, and the steps of each optimizer.
        is_over: Whether these counts are final: the batch is over, or the rank makes no more passes in it.
        called: Where its backward passes were called, as far as known.
    """

    counts: tuple[int, ...] = ()
    is_over: bool = False
    called: tuple[str, ...] = ()

    def of(self, kind: int) -> int:
        """The count of one kind."""
        return self.counts[kind] if kind < len(self.counts) else 0


class DifferentCounts(NamedTuple):
    """Different numbers of backward passes or optimizer steps that ranks have made in one batch.

    Attributes:
        batch: Epoch and index of the batch.
        kind: What is counted, as an index of ``BatchCounts.counts``.
        made: The counts of each rank; without ranks that may make more.
        before: The counts of these ranks in the batch before, or in the last similar one if the counts recur in turns,
            as far as known.
    """

    batch: tuple[int, ...]
    kind: int
    made: dict[int, BatchCounts]
    before: dict[int, BatchCounts]

    @property
    def is_accumulation(self) -> bool:
        """Whether the passes that reduce nothing differ, as with accumulated gradients."""
        return self.kind == 1

    @property
    def are_exchanged(self) -> bool:
        """Whether ranks need each other for it: not for an optimizer's step."""
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
        """``"1 on rank 1 but 2 on ranks 0, 2"``."""
        return apart_words(f"{count} on {ranks_words(who)}" for count, who in sorted(self._by_count().items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The minority. If there is none, the ranks whose number differs from the batch before, if others' do not.

        Else those that made fewer; all of them if each optimizer may have evaluated the loss as often as it liked.
        """
        by_count = self._by_count()
        few = min(by_count, key=lambda count: (len(by_count[count]), count))
        # A minority that is still making what all have made before does nothing unusual.
        is_usual = bool(self._changed) and {*self._changed}.isdisjoint(by_count[few])
        are_final = any(self.made[rank].is_over for rank in by_count[few])
        if len({len(who) for who in by_count.values()}) > 1 and (are_final or not is_usual):
            return by_count[few]
        if self._is_searched:
            return tuple(sorted(self.made))
        return self._changed or by_count[few]

    @property
    def is_more(self) -> bool:
        """Whether these ranks have made more than others, rather than skipped something."""
        least = min(self._by_count())
        is_more = any(self.made[rank].of(self.kind) > least for rank in self.ranks)
        return self.kind == 0 and (is_more or self._is_searched)

    @property
    def location(self) -> str:
        """A line from which they have made a call more than others, or more often; empty if unknown."""
        usual = Counter[str]()
        for rank, made in (*self.made.items(), *self.before.items()):
            if rank not in self.ranks or made is not self.made[rank]:
                usual |= Counter(made.called)
        own = (place for rank in self.ranks for place in Counter(self.made[rank].called) - usual)
        return next(filter(None, own), "")

    @property
    def skipped_at(self) -> str:
        """Where another rank made the call that these have skipped; empty if unknown."""
        few = self.made[self.ranks[0]]
        own = (*few.called, *[""] * (few.of(self.kind) - len(few.called)))
        for made in self.made.values():
            if made.of(self.kind) > len(own) and len(made.called) > len(own):
                pairs = zip(made.called, (*own, ""), strict=False)
                return next(place for place, mine in pairs if place != mine)
        return self.called_at if self.kind == 0 else ""

    @property
    def called_at(self) -> str:
        """The only line from which all have called their passes in this batch; empty if several, or unknown."""
        places = {place for made in self.made.values() for place in made.called}
        # Of many calls, the first ones are noted.
        are_known = all(made.called or not made.of(0) for made in self.made.values())
        return next(iter(places)) if len(places) == 1 and are_known else ""

    @property
    def _changed(self) -> tuple[int, ...]:
        """The ranks whose number differs from the batch before; empty if that of all does, or is unknown."""
        changed = tuple(rank for rank, before in self.before.items() if self._differs(rank, before))
        return changed if len(self.before) == len(self.made) and len(changed) < len(self.made) else ()

    def _differs(self, rank: int, before: BatchCounts) -> bool:
        now = self.made[rank]
        made, usual = now.of(self.kind), before.of(self.kind)
        return made != usual and (now.is_over or made > usual)

    @property
    def _is_searched(self) -> bool:
        """Whether optimizers may have evaluated the loss as often as their search took: all have several passes."""
        are_manual = any(made.called[:1] not in ((), ("",)) for made in self.made.values())
        return self.kind == 0 and min(self._by_count()) > _USUAL_PASSES and not are_manual

    def _by_count(self) -> dict[int, tuple[int, ...]]:
        return ranks_by({rank: made.of(self.kind) for rank, made in self.made.items()})


@once
def different_counts(view: Timeline) -> DifferentCounts | None:
    """The first batch in which ranks made different numbers of passes or steps; None if there is none."""
    by_rank = {facts.rank: facts.steps for facts in sorted(view.job.ranks, key=lambda facts: facts.rank)}
    if len(by_rank) < 2 or not all(steps.passes or steps.under_way for steps in by_rank.values()):
        return None
    since = max((steps.passes or (steps.under_way,))[0][:2] for steps in by_rank.values())
    changes = {run[:2] for steps in by_rank.values() for run in steps.passes} | {since}
    changes |= {steps.under_way[:2] for steps in by_rank.values() if steps.under_way}
    for batch in sorted(change for change in changes if change >= since):
        made = _with_passed(view, {rank: _made_in(steps, batch) for rank, steps in by_rank.items()})
        for kind in range(max(len(one.counts) for one in made.values())):
            if final := _final_counts(made, kind):
                similar = _similar_batch(by_rank[next(iter(final))], batch)
                before = {
                    rank: counts for rank in final if (counts := _last_counts(by_rank[rank], similar)) is not None
                }
                return DifferentCounts(batch, kind, final, before)
        if not all(one.is_over for one in made.values()):
            return None
    return None


def _with_passed(view: Timeline, made: dict[int, BatchCounts]) -> dict[int, BatchCounts]:
    """The same counts; final for ranks that are past the lines of all those in the last pass that any has begun."""
    most = max(one.of(0) for one in made.values())
    ahead = [rank for rank, one in made.items() if one.of(0) == most and not one.is_over]
    lines = {rank: user_frames(inside_trainer(view.facts[rank].stack)) for rank in made if rank in view.facts}

    def is_past(rank: int) -> bool:
        return bool(ahead) and all(has_passed(lines.get(rank, ()), lines.get(other, ())) for other in ahead)

    return {rank: _as_of(one, one.of(0) < most and is_past(rank)) for rank, one in made.items()}


def skips_steps(view: Timeline) -> tuple[str, ...]:
    """Where the user's code may have skipped an optimizer's step, as far as known: ``"file:line in function"``."""
    return tuple(dict.fromkeys(place for facts in view.facts.values() for place in facts.steps.skips_steps))


def _final_counts(made: dict[int, BatchCounts], kind: int) -> dict[int, BatchCounts]:
    """The ranks that have made fewer than others and will not make more, and those others; empty if there are none."""
    if kind == 1 and (reducing := _reducing_counts(made)):
        return reducing
    most = max(one.of(kind) for one in made.values())
    begun = [one for one in made.values() if one.of(kind) == most]
    final = {rank for rank, one in made.items() if one.is_over or (kind == 0 and _has_stepped(one, begun))}
    if not any(made[rank].of(kind) < most for rank in final):
        return {}
    counts = {rank: _as_of(one, rank in final) for rank, one in made.items() if rank in final or one.of(kind) == most}
    # Ranks do not need each other for extra passes that reduce nothing.
    is_harmless = kind < len(_MADE) and len({one.of(0) - one.of(1) for one in counts.values()}) == 1
    return {} if is_harmless else counts


def _reducing_counts(made: dict[int, BatchCounts]) -> dict[int, BatchCounts]:
    """The same for passes that reduce gradients: a rank that is still in such a pass counts with it.

    Of ranks in one batch, those that have begun as many passes as any other can be compared.
    """
    reduced = {rank: one.of(0) - one.of(1) for rank, one in made.items()}
    most, passes = max(reduced.values()), max(one.of(0) for one in made.values())
    final = [rank for rank, one in made.items() if one.is_over or one.of(0) == passes]
    if not any(reduced[rank] < most and made[rank].of(1) for rank in final):
        return {}
    return {rank: _as_of(one, rank in final) for rank, one in made.items() if rank in final or reduced[rank] == most}


def _as_of(one: BatchCounts, is_final: bool) -> BatchCounts:
    return one._replace(is_over=one.is_over or is_final)


def _has_stepped(one: BatchCounts, begun: list[BatchCounts]) -> bool:
    """Whether it has already made an optimizer step, while the ranks with the most passes have made none."""
    return sum(one.counts[len(_MADE) :]) > 0 and all(sum(other.counts[len(_MADE) :]) == 0 for other in begun)


def _made_in(steps: StepFacts, batch: tuple[int, ...]) -> BatchCounts:
    if batch > (steps.passes_epoch, steps.passes_batch):
        is_this = steps.under_way[:2] == batch
        return BatchCounts(steps.under_way[2:], called=_called(steps, len(steps.passes))) if is_this else BatchCounts()
    return _last_counts(steps, batch) or BatchCounts(is_over=True)


def _similar_batch(steps: StepFacts, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The last batch of the same kind if the counts of the batches before recur in turns; else the batch before."""
    epoch, index = batch
    counts = [_run_of(steps, (epoch, number))[2:] for number in range(max(index - _TURNS, 0), index)]
    # At least one batch has to confirm a period.
    period = next((period for period in range(1, len(counts)) if counts[period:] == counts[:-period]), 1)
    return epoch, index - period


def _run_of(steps: StepFacts, batch: tuple[int, ...]) -> tuple[int, ...]:
    return next((run for run in reversed(steps.passes) if run[:2] <= batch), ())


def _last_counts(steps: StepFacts, batch: tuple[int, ...]) -> BatchCounts | None:
    """The counts of the run of equal batches that this batch is in; of the last run before it if it is in none."""
    index = max((index for index, run in enumerate(steps.passes) if run[:2] <= batch), default=None)
    return None if index is None else BatchCounts(steps.passes[index][2:], True, _called(steps, index))


def _called(steps: StepFacts, index: int) -> tuple[str, ...]:
    """Where the passes of a run were called; if unknown, where all known runs with the same counts were."""
    known = steps.passes_from[index] if index < len(steps.passes_from) else ()
    if known or index >= len(steps.passes):
        return known
    alike = {
        places
        for run, places in zip(steps.passes, steps.passes_from, strict=False)
        if places and run[2:] == steps.passes[index][2:]
    }
    return alike.pop() if len(alike) == 1 else ()
