"""What to do about diverged collectives, by their reason."""

import re
from dataclasses import replace

from lightning_ncclsafe.code.libraries import MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Decides
from lightning_ncclsafe.rules.kit import Finding, Timeline, decision, is_in, just_caught, short_place, stack_of

SAME_CALLS = (
    "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
    "all_gather, barrier, trainer.log_dir, trainer.callback_metrics or save_checkpoint under a condition on the rank "
    "or on the data, the same keys in log_dict on all ranks, and the same branches of the model in forward."
)
_DECIDED = (
    "Make this call on all ranks or on none: move it out of what {place} decides, or let all ranks decide alike there, "
    "by a value that is the same on all of them (a number of steps, a metric logged with sync_dist=True) or that one "
    "rank broadcasts (trainer.strategy.broadcast). If that line is not the reason, look for other collectives under a "
    "condition on the rank or on the data."
)
_BREAKPOINT = (
    "torch.distributed.breakpoint() is for all ranks: one gets the debugger, and the others wait in a barrier until it "
    "goes on. Call it on all of them at the same line, or use pdb with devices=1."
)
_BREAKPOINT_CALL = re.compile(r"\bdist\w*\.breakpoint\(")
_CAUGHT = (
    "Do not catch on one rank alone what skips a call that needs all ranks, as {where} may have done: correct the "
    "reason of the {error}, and let it end the rank, which ends the others, too; or let all ranks agree on it first "
    "(reduce a flag that shows which rank has failed, on all ranks in the same place). If that is not why, look for "
    "other collectives under a condition on the rank or on the data."
)
_MODEL_CHECKPOINT = (
    "ModelCheckpoint needs the value that it monitors on all ranks, and the same one: log it with sync_dist=True, and "
    "not under a condition."
)
MONITORED_KEY = f"{_MODEL_CHECKPOINT} So does EarlyStopping."
PASSES = (
    "Make the same number of backward passes on all ranks in every batch: agree before one rank repeats or divides a "
    "batch, and use no optimizer that evaluates the loss as often as each rank's own values require (LBFGS). Training "
    "since that batch has mixed gradients."
)
PAIRED = (
    f"{SAME_CALLS} Look for a forward or backward pass that only some ranks make or leave out: with a sharded model, "
    "each calls collectives. Parameters and gradients since that batch may be wrong."
)
THREADS = (
    "Call collectives only in the thread that trains: let the other thread pass its numbers to a hook, which reduces "
    "them on all ranks after the same batch. If it must be another thread, give it its own process group "
    "(torch.distributed.new_group, on all ranks), and call the same collectives there on all ranks."
)
EXCEPT_BLOCK = (
    "Make no call that needs all ranks while an exception of one rank is handled. Let it end the rank, which ends the "
    "others, too; or let all ranks agree on it first: reduce a flag that shows which rank has failed, on all ranks in "
    "the same place."
)
TRAINER = (
    "Call trainer.fit, validate, test and predict on all ranks: each begins with collectives. For work that one "
    "rank does alone, make another Trainer with devices=1 and no distributed strategy, once the other ranks have left."
)


def same_calls(view: Timeline) -> str:
    """The general remedy, with a note on ModelCheckpoint if a rank is in it."""
    in_checkpoint = any(is_in(MODEL_CHECKPOINT, stack_of(view, rank)) for rank in view.facts)
    return f"{SAME_CALLS} {_MODEL_CHECKPOINT}" if in_checkpoint else SAME_CALLS


def as_decided(view: Timeline, finding: Finding) -> Finding:
    """The same finding; if a line or an exception may have decided about the call, with what to do about that."""
    is_general = finding.remedy in ("", SAME_CALLS, f"{SAME_CALLS} {_MODEL_CHECKPOINT}")
    if not is_general:
        return finding
    deciding = decision(view, finding.location)
    if deciding is not None and _BREAKPOINT_CALL.search(deciding.at.code):
        return replace(finding, remedy=_BREAKPOINT)
    is_clause = deciding is not None and all(branch.on is Decides.EXCEPTION for _, branch in deciding.branches)
    caught = [(rank, error) for rank in finding.ranks if rank in view.facts for error in just_caught(view, rank)]
    if caught and (is_clause or not finding.decided_at):
        rank, error = caught[0]
        return replace(finding, remedy=_CAUGHT.format(where=f"rank {rank}", error=error.type))
    if not finding.decided_at:
        return finding
    if is_clause:
        place = short_place(finding.decided_at)
        return replace(finding, remedy=_CAUGHT.format(where=f"the clause at {place}", error="exception"))
    return replace(finding, remedy=_DECIDED.format(place=short_place(finding.decided_at)))
