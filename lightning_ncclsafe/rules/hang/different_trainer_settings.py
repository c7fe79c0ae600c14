"""The cause different-trainer-settings: ranks have different settings of the Trainer."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import RESUMED
from lightning_ncclsafe.facts import LoopEnd, Phase, TrainerFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Timeline,
    alone_in_trainer,
    apart_words,
    capitalised,
    clause,
    deviating,
    finding,
    grouped,
    hang_rule,
    is_in,
    joined,
    odd_sizes,
    out_of_data_first,
    overrun_ranks,
    ranks_by,
    ranks_words,
    recorder_evidence,
    waiting_sentence,
)

_CHECKPOINT = "ckpt_path"
_NOT_SET = "not set"
_START = (_CHECKPOINT, "first epoch", "first step")
_REMEDY = (
    "Give the Trainer the same arguments on all ranks: look for what each rank computes for itself, from a clock, the "
    "host's name, its memory, its environment or a file that only this rank reads. Decide it once: as an argument of "
    "the job, or, where ranks have joined their process group, on one rank that broadcasts it."
)
_REMEDY_START = (
    'Let all ranks resume from the same checkpoint: set ckpt_path to one path that all hosts see, not to "last" or the '
    "newest file in a folder that each rank has for itself, by its name, a time or tempfile. Check that the file "
    "exists on all hosts before the start."
)


# Another call of the Trainer, lr_find for instance, may have its own settings.
@hang_rule(after="unfinished-rank", unless=(alone_in_trainer,), plan=Plan.STOP)
def different_trainer_settings(view: Timeline) -> Iterator[Finding]:
    """Ranks have different Trainer settings, or continue from different steps, and so call different collectives.

    Symptom:
        Ranks wait in different collectives, or one has ended its epoch while the others are in a batch; the numbers of
        backward passes, optimizer steps or validations differ.

    Cause:
        accumulate_grad_batches, val_check_interval, limit_*, max_* or precision computed by each rank for itself; a
        checkpoint that differs between hosts.

    Remedy:
        Pass the same arguments to the Trainer on all ranks, and resume all ranks from the same checkpoint.

    Cannot see:
        Changes made after training began, unless they keep a rank training; settings of the model, the optimizer or the
        strategy.
    """
    differing = _differing(view)
    if not differing or not (view.waiting or view.raised):
        return
    odd = _narrowed(view, deviating(map(grouped, differing.values())))
    # A rank that works may be what the others wait for, whatever the settings.
    is_explained = bool(view.working(view.facts))
    changed_at = _changed_at(view, odd, differing)
    given_at = "" if changed_at else _given_at(view, differing)
    finished = [rank for rank, facts in sorted(view.facts.items()) if facts.progress.phase is Phase.FINISHED]
    done = f"{capitalised(clause(finished, 'has|have finished'))}." if finished else ""
    yield finding(
        view,
        odd,
        joined((f"Ranks train with different settings: {'; '.join(_words(differing))}.", waiting_sentence(view), done)),
        confidence=Confidence.POSSIBLE if is_explained else Confidence.LIKELY,
        evidence=(*_evidence(differing), *_source_evidence(given_at), *recorder_evidence(view)),
        remedy=_REMEDY_START if differing.keys() <= set(_START) else _REMEDY,
        location=changed_at or given_at,
    )


def _changed_at(view: Timeline, ranks: tuple[int, ...], differing: dict[str, dict[int, str]]) -> str:
    """The only line that may have changed such a setting of one of these ranks during training; empty if unknown."""
    known = (view.trainers[rank] for rank in ranks if rank in view.trainers)
    trainers = (one for one in known if _may_be_it(one, differing))
    lines = {line for trainer in trainers for line in trainer.ended_at}
    return lines.pop() if len(lines) == 1 else ""


def _given_at(view: Timeline, differing: dict[str, dict[int, str]]) -> str:
    """The only line of the user's that may have given such a setting different values; empty if unknown."""
    trainers = view.trainers.values()
    # What has changed during training was given its value elsewhere.
    if any(differing.keys() & trainer.changed.keys() for trainer in trainers):
        return ""
    lines = {line for trainer in trainers for name in differing for line in trainer.set_at.get(name, ())}
    return lines.pop() if len(lines) == 1 else ""


def _may_be_it(trainer: TrainerFacts, differing: dict[str, dict[int, str]]) -> bool:
    """Whether the setting that differs is one that it has changed, in a line that may have ended its loop."""
    return trainer.end is not LoopEnd.SHOULD_STOP and differing.keys() <= trainer.changed.keys()


def _narrowed(view: Timeline, odd: tuple[int, ...]) -> tuple[int, ...]:
    """Of these ranks, those whose collectives differ in size: the settings of ranks that are gone are unknown."""
    split = view.any_divergence
    few = odd_sizes(view, split) if split is not None and overrun_ranks(view, split) else ()
    return few if few and {*few} < {*odd} else odd


def _differing(view: Timeline) -> dict[str, dict[int, str]]:
    """Each setting that differs between ranks, with the value of each rank."""
    by_name: dict[str, dict[int, str]] = defaultdict(dict)
    trainers = view.trainers
    by_rank = {rank: trainer.settings for rank, trainer in sorted(trainers.items())}
    early = out_of_data_first(view)
    # A rank that changed its settings stopped early; otherwise those that changed theirs continue.
    if early and not any(trainers[rank].changed for rank in early if rank in trainers):
        by_rank = {rank: settings | trainers[rank].changed for rank, settings in by_rank.items()}
    # Of a rank that has not begun to train, only the checkpoint is known.
    begun = {rank: settings for rank, settings in by_rank.items() if settings.keys() - {_CHECKPOINT}}
    for name in dict.fromkeys(name for settings in by_rank.values() for name in settings):
        for rank, settings in (by_rank if name == _CHECKPOINT else begun).items():
            value = settings.get(name, _NOT_SET)
            # Each host may have a path of its own.
            by_name[name][rank] = "set" if name == _CHECKPOINT and name in settings else value
    # Lightning sets it when it resumes: a rank that has not got that far may have one, too.
    without = [rank for rank, value in by_name[_CHECKPOINT].items() if value == _NOT_SET]
    if not all(is_in(RESUMED, view.facts[rank].stack) for rank in without):
        del by_name[_CHECKPOINT]
    return {name: values for name, values in by_name.items() if len({*values.values()}) > 1}


def _words(differing: dict[str, dict[int, str]]) -> Iterator[str]:
    for name, values in list(differing.items())[:LISTED]:
        each = (f"{value} on {ranks_words(ranks)}" for value, ranks in ranks_by(values).items())
        yield f"{name} is {apart_words(each)}"
    if len(differing) > LISTED:
        yield f"{len(differing) - LISTED} more"


def _evidence(differing: dict[str, dict[int, str]]) -> Iterator[Evidence]:
    for words in _words(differing):
        yield Evidence(source="trainer", text=f"{words}.")


def _source_evidence(given_at: str) -> Iterator[Evidence]:
    if given_at:
        text = f"{given_at} is the only line found that may give it different values."
        yield Evidence(source="source code", text=text)
