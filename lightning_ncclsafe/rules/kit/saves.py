"""Questions about saves of checkpoints that failed: in which stacks a save is, what may be wrong with the storage."""

from lightning_ncclsafe.code.libraries import BEFORE_SAVING
from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.rules.kit.activity import Kind
from lightning_ncclsafe.rules.kit.landmarks import landmark

# Of the text of what was raised, and what to do.
_KNOWN = (
    ("No space left", "free space there, or keep fewer checkpoints (save_top_k)"),
    ("Disk quota exceeded", "free space there, or ask for a larger quota"),
    ("Permission denied", "let the user of the job write there, on every host"),
    ("Read-only file system", "look at why the file system is mounted read-only: after an error, mostly"),
    ("Stale file handle", "look at the network file system's server"),
    ("Can't pickle", "leave what cannot be pickled out of hyper-parameters and on_save_checkpoint"),
    ("cannot pickle", "leave what cannot be pickled out of hyper-parameters and on_save_checkpoint"),
)
_MESSAGE = 200


def is_save(stack: tuple[Frame, ...]) -> bool:
    """Whether a frame of Lightning's or torch's in this stack saves a checkpoint; to decide about one is no save."""
    marks = (landmark(frame) for frame in stack if not BEFORE_SAVING.has(frame.file, frame.function))
    return any(mark is not None and mark.kind == Kind.CHECKPOINT.name for mark in marks)


def said(error: ExceptionFacts) -> str:
    """``"OSError: No space left on device"``, the message's first line, cut to 200 characters."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    line = lines[0].rstrip(".") if lines else ""
    short = line if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}…"
    return f"{error.type}: {short}" if short else error.type


def advice(error: ExceptionFacts) -> str:
    """What to do about it, as a sentence begins; ``"Correct it"`` where nothing better is known."""
    found = next((advice for text, advice in _KNOWN if text in error.message), "correct it")
    return found[:1].upper() + found[1:]
