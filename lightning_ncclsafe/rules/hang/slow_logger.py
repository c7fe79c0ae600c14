"""The cause slow-logger: the others wait for a rank that is in a logger's write or flush."""

from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import (
    HOOKS_OF_LOGGERS,
    LOG_WRITERS,
    LOGGING,
    MLFLOW_CLIENT,
    PROCESSES,
    PYTHON_LOGGING,
    REQUESTS,
    SUMMARY_WRITER,
    WANDB_RUN,
)
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Frame, LoggerFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Kind,
    Plan,
    Timeline,
    awaited_thread,
    below_user,
    directories,
    directory_words,
    duration_words,
    hang_rule,
    how_we_know,
    inside_trainer,
    is_in,
    size_words,
    storage_evidence,
    straggler_confidence,
    straggler_finding,
)

# Files of classes that users call, and the names of these classes.
_OWNERS = ((SUMMARY_WRITER, "SummaryWriter"), (WANDB_RUN, "wandb.Run"), (MLFLOW_CLIENT, "MlflowClient"))
_OFFLOAD = "LoggerOffload"
_REMEDY_OFFLOAD = (
    "Take the loggers off the training thread: Trainer(callbacks=[LoggerOffload()]), from lightning_ncclsafe import "
    "LoggerOffload."
)
_REMEDY = (
    f"{_REMEDY_OFFLOAD} Without it: log to a directory on a local disk and copy it away after the run, or log less "
    "often (log_every_n_steps, self.log(on_step=False))."
)
_REMEDY_REQUEST = (
    "This logger waits for a server: give the request a timeout (urlopen(request, timeout=5), requests.post(…, "
    f"timeout=5)) and catch what it raises then. {_REMEDY_OFFLOAD} Or log less often (log_every_n_steps, "
    "self.log(on_step=False))."
)
_REMEDY_UPLOAD = (
    "Upload checkpoints less often (every_n_epochs, every_n_train_steps or save_top_k of ModelCheckpoint, log_model of "
    "the logger), from a thread of the logger's own, or after the run: every rank waits while after_save_checkpoint "
    "runs, which LoggerOffload leaves on the training thread."
)
_REMEDY_PROCESS = (
    "This logger waits for its process {pid}: look at what that one waits for ({look}). Tell it to "
    "finish before the logger waits for it (finish() or close() of the tracker, the last entry of its queue), on every "
    "way out of training, and wait with a timeout."
)
_REMEDY_PYTHON = (
    "Take the handler off the training thread: add a logging.handlers.QueueHandler to the logger in its place, and let "
    "a logging.handlers.QueueListener call it; or log less."
)


# A thread that is on a core in most looks computes.
_MOSTLY = 0.6


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart``; ``unknown`` if a logger waits for its own process, or computes: the next start may do the same."""
    ranks = [view.facts[rank] for rank in finding.ranks if rank in view.facts]
    return Plan.UNKNOWN if any(_awaits_process(facts) or _computes(facts) for facts in ranks) else Plan.RESTART


def _computes(facts: RankFacts) -> bool:
    thread = facts.machine.main_thread
    return thread is not None and thread.running_looks >= max(_MOSTLY * thread.looks, 2)


def _awaits_process(facts: RankFacts) -> bool:
    return bool(facts.awaited_processes) and is_in(PROCESSES, below_user(facts.stack))


@hang_rule(after="rank-zero-only-work", plan=_plan)
def slow_logger(view: Timeline) -> Iterator[Finding]:
    """A rank, usually rank 0, is held up in a logger while the others wait in a collective.

    Symptom:
        Steps become slow on all ranks but one, then a collective times out; that one rank never reports anything.

    Cause:
        The logger, one of Lightning's or a handler of Python's logging, writes, flushes or sends on the training
        thread, and its storage or server is slow.

    Remedy:
        Take the loggers off the training thread with LoggerOffload, or log to a local disk, or less often. Python has
        QueueHandler for its own.

    Cannot see:
        How fast the storage would be, and what a logger's own background thread or server does.
    """
    ranks = tuple(rank for rank in view.suspects if view.activities[rank].kind is Kind.LOGGER)
    if not ranks:
        return
    confidence = straggler_confidence(view)
    if _is_in_pythons(view.facts[ranks[0]]):
        yield straggler_finding(
            view,
            ranks,
            "is|are held up in a handler of Python's logging",
            confidence=confidence,
            evidence=how_we_know(view, ranks),
            remedy=_REMEDY_PYTHON,
        )
        return
    places = ", ".join(map(directory_words, directories(view.facts[ranks[0]], of_checkpoints=False)))
    spent = (item for rank in ranks[:LISTED] for item in _logger_evidence(view.facts[rank]))
    storage = (item for rank in ranks[:LISTED] for item in storage_evidence(view.facts[rank], of_checkpoints=False))
    yield straggler_finding(
        view,
        ranks,
        "is|are held up in a logger",
        f", which writes to {places}" if places else "",
        confidence=confidence,
        evidence=(*how_we_know(view, ranks), *spent, *storage),
        remedy=_remedy([view.facts[rank] for rank in ranks]),
    )


def _remedy(ranks: list[RankFacts]) -> str:
    if all(map(_uploads_a_checkpoint, ranks)):
        return _REMEDY_UPLOAD
    first = ranks[0]
    if _awaits_process(first):
        pid = first.awaited_processes[0].pid
        return _REMEDY_PROCESS.format(pid=pid, look=f"py-spy dump --pid {pid}, if it runs Python")
    return _REMEDY_REQUEST if _requests(first) else _REMEDY


def _requests(facts: RankFacts) -> bool:
    """Whether a line of the user's own logger waits for the answer of a server, and no library for loggers does."""
    thread = awaited_thread(facts)
    below = below_user(thread.stack if thread is not None else facts.stack)
    return is_in(REQUESTS, below) and not is_in(LOG_WRITERS, below)


def _is_in_pythons(facts: RankFacts) -> bool:
    """Whether it is a handler of Python's logging that holds it up, called by the user's code."""
    stack = _with_thread(facts)
    return is_in(PYTHON_LOGGING, stack) and not is_in(LOGGING | LOG_WRITERS, stack)


def _uploads_a_checkpoint(facts: RankFacts) -> bool:
    """Whether the logger was told of a checkpoint that has been saved."""
    return is_in(HOOKS_OF_LOGGERS, inside_trainer(facts.stack))


def _with_thread(facts: RankFacts) -> tuple[Frame, ...]:
    """The main thread's frames, and those of the thread that it waits for."""
    thread = awaited_thread(facts)
    return (*facts.stack, *(thread.stack if thread is not None else ()))


def _logger_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """How long a rank has been in which call, and the state of its offloaded loggers."""
    call = _call(facts)
    places = " and ".join(directory_words(entry) for entry in directories(facts, of_checkpoints=False))
    if call:
        on = f" on {places}" if places else ""
        text = f"Has spent {duration_words(facts.progress.idle_s)} in {call}{on}."
        yield Evidence(source="logger", rank=facts.rank, text=text)
    for logger in facts.loggers:
        yield Evidence(source="logger", rank=facts.rank, text=_offload_words(logger))


def _call(facts: RankFacts) -> str:
    """The outermost call of a logging library, ``"SummaryWriter.flush"``; empty if none is known."""
    for frame in _with_thread(facts):
        if frame.mark == Mark.LOGGER and not frame.function.startswith("_"):
            return f"{_OFFLOAD}.{frame.function}"
        for code, owner in _OWNERS:
            if code.has(frame.file, frame.function):
                return f"{owner}.{frame.function}"
    return ""


def _offload_words(logger: LoggerFacts) -> str:
    to = f" to {logger.path}" if logger.path else ""
    now = f"a write has been running for {duration_words(logger.writing_s)}, " if logger.writing_s else ""
    longest, waited = duration_words(logger.longest_write_s), duration_words(logger.waited_s)
    return (
        f"{logger.logger} is off the training thread{to}: {now}the longest took {longest}, "
        f"{size_words(logger.memory_bytes + logger.staged_bytes)} wait, training has waited {waited} for it."
    )
