"""The newest complete checkpoint, which all ranks agree on, and why newer ones are skipped.

Each rank lists the checkpoints that it sees. Rank 0 takes the newest that all ranks see alike, and the others follow.
"""

import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints.folder import METADATA, REST, check_lengths, files_of
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, keep_trying, wait_for_keys
from lightning_ncclsafe.facts import codec
from lightning_ncclsafe.facts.wording import clause
from lightning_ncclsafe.report.terminal import say_on_stderr

_SUFFIX = ".ckpt"
# A sharded checkpoint is a folder: shards in torch's distributed format, and the rest in a file of Lightning's.
_SHARDED = (METADATA, REST)
# Enough, even if the newest ones are all damaged.
_MOST = 16
_MOST_NAMED = 3


class NoCommonCheckpointError(RuntimeError):
    """The ranks could not agree on a checkpoint; if some started from scratch, that would be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """A checkpoint as one rank sees it.

    Attributes:
        path: Its absolute path.
        size_bytes: The size of the file, or of all files in the folder.
        modified_ns: When it was written, nanoseconds since the epoch.
    """

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint that all ranks resume from.

    Attributes:
        path: The checkpoint; empty if there is none.
        lines: Messages about checkpoints that are skipped.
        error: Why ranks cannot resume or start at all; empty if they can.
    """

    path: str = ""
    lines: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointList:
    """What one rank has found.

    Attributes:
        candidates: Complete checkpoints, the newest first.
        lines: Messages about incomplete ones.
    """

    candidates: tuple[SeenCheckpoint, ...] = ()
    lines: tuple[str, ...] = ()


@marked(Mark.STORE)
def agree_on_newest(
    folders: Iterable[Path],
    exchange: Exchange,
    *,
    rank: int,
    world_size: int,
    deadline_s: float,
    fits: Callable[[Path], str] = lambda _: "",
    say: Callable[[str], None] = say_on_stderr,
) -> str:
    """The newest complete checkpoint that all ranks see alike; empty if there is none. All ranks call it.

    Args:
        fits: Why this training cannot resume from a checkpoint, in words; empty if it can. Called on rank 0.

    Raises:
        NoCommonCheckpointError: On all ranks, if only some see checkpoints, or some ranks did not answer.
    """
    seen = found_in(folders)
    try:
        keep_trying(exchange, lambda: exchange.set(f"resume/{rank}", codec.encode(seen)), deadline_s=deadline_s)
        if rank == 0:
            keys = [f"resume/{other}" for other in range(world_size)]
            answers = wait_for_keys(exchange, keys, deadline_s=deadline_s)
            choice = chosen(
                [codec.decode(CheckpointList, answers[key]) for key in keys if key in answers], world_size, fits
            )
            encoded = keep_trying(
                exchange, lambda: exchange.set_if_absent("resume/choice", codec.encode(choice)), deadline_s=deadline_s
            )
        else:
            # Longer than rank 0 itself waits.
            found = wait_for_keys(exchange, ["resume/choice"], deadline_s=2 * deadline_s)
            late = Choice(error="rank 0 did not announce a checkpoint to resume from")
            encoded = found.get("resume/choice") or exchange.set_if_absent("resume/choice", codec.encode(late))
        choice = codec.decode(Choice, encoded)
    except (ExchangeError, codec.DecodeError) as error:
        raise NoCommonCheckpointError(
            f"rank {rank} could not agree with the others on a checkpoint: {error}"
        ) from error
    if rank == 0:
        for line in choice.lines:
            say(line)
    if choice.error:
        raise NoCommonCheckpointError(choice.error)
    return choice.path


def found_in(folders: Iterable[Path]) -> CheckpointList:
    """The checkpoints in these folders, the newest first; a missing folder has none."""
    candidates, lines = list[SeenCheckpoint](), list[str]()
    for folder in dict.fromkeys(folders):
        try:
            paths = [path for path in folder.iterdir() if path.name.endswith(_SUFFIX) and not path.name.startswith(".")]
        except FileNotFoundError:
            continue
        except OSError as error:
            lines.append(f"{folder} cannot be searched for checkpoints: {error}")
            continue
        for path in paths:
            with suppress(OSError):
                candidates.append(_candidate(path))
    candidates.sort(key=lambda one: (one.modified_ns, one.path), reverse=True)
    whole: list[SeenCheckpoint] = []
    for one in candidates[:_MOST]:
        if problem := why_not_whole(Path(one.path)):
            lines.append(f"{one.path} is skipped: {problem}")
        else:
            whole.append(one)
    return CheckpointList(candidates=tuple(whole), lines=tuple(lines))


def _candidate(path: Path) -> SeenCheckpoint:
    status = path.stat()
    size, modified_ns = status.st_size, status.st_mtime_ns
    if stat.S_ISDIR(status.st_mode):
        parts = [part.stat() for part in path.iterdir()]
        size = sum(part.st_size for part in parts)
        modified_ns = max((part.st_mtime_ns for part in parts), default=modified_ns)
    return SeenCheckpoint(path=os.path.abspath(path), size_bytes=size, modified_ns=modified_ns)


def why_not_whole(path: Path) -> str:
    """Why a checkpoint cannot be loaded, in words; empty if no reason is found. Nothing is unpickled."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            absent = [name for name in _SHARDED if not (path / name).is_file()]
            if absent:
                return f"it lacks {' and '.join(absent)}, as if its writer was interrupted"
            check_lengths(path, files_of(path))
            path = path / REST
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "it is not a file"
        # The directory of a zip file is at its end: a truncated file has none.
        with zipfile.ZipFile(path) as file:
            names = {name.rpartition("/")[2] for name in file.namelist()}
        return "" if "data.pkl" in names else "it is not a PyTorch checkpoint"
    except zipfile.BadZipFile:
        return f"it is truncated or damaged ({path.stat().st_size:,} bytes)"
    except OSError as error:
        return str(error)


def chosen(seen: Sequence[CheckpointList], world_size: int, fits: Callable[[Path], str] = lambda _: "") -> Choice:
    """The common choice, made from what each rank that answered has seen, by rank."""
    if len(seen) < world_size:
        return Choice(error=f"{world_size - len(seen)} of {world_size} ranks did not report which checkpoints they see")
    lines = [*dict.fromkeys(line for one in seen for line in one.lines)]
    by_rank = [{(one.path, one.size_bytes) for one in one_rank.candidates} for one_rank in seen]
    every = sorted(
        {(one.path, one.size_bytes): one for one_rank in seen for one in one_rank.candidates}.values(),
        key=lambda one: (one.modified_ns, one.path),
        reverse=True,
    )
    passed = False
    for one in every:
        without = [rank for rank, known in enumerate(by_rank) if (one.path, one.size_bytes) not in known]
        if without:
            passed = True
            lines.append(f"{one.path} is skipped: {clause(without, 'does|do')} not see all of it")
        elif problem := fits(Path(one.path)):
            lines.append(f"{one.path} is skipped: {problem}")
        else:
            return Choice(path=one.path, lines=tuple(lines))
    if passed:
        # Starting from scratch would lose the progress in them.
        named = ", ".join(one.path for one in every[:_MOST_NAMED])
        return Choice(
            lines=tuple(lines),
            error=f"Only some ranks see these checkpoints: {named}. All hosts must see the folder. Copy the newest "
            "checkpoint to all hosts, or move it away to start from scratch.",
        )
    return Choice(lines=tuple(lines))


def why_unfit(path: Path, expected: Mapping[str, Any] | None, *, steps: int = 0) -> str:
    """Why this training cannot resume from a checkpoint, in words; empty if no reason is found.

    Args:
        path: A file or a folder.
        expected: The model's ``state_dict``; None if unknown. Not compared with a folder.
        steps: Optimizer steps that the Trainer has already made, in an earlier ``fit``.
    """
    try:
        content: Any = tensors.load_outline(path / REST if path.is_dir() else path)
    except OSError as error:
        return f"it cannot be read ({error})"
    except Exception:  # Lightning will load it, or say why not
        return ""
    # Lightning requires this to resume.
    if not isinstance(content, Mapping) or "lr_schedulers" not in content:
        return "it has weights only (save_weights_only=True), so training cannot resume from it"
    step = content.get("global_step")
    if type(step) is int and step < steps:
        return f"it is of step {step}, but this Trainer has already made {steps} steps"
    if expected is None or path.is_dir():
        return ""
    found = content.get("state_dict")
    if not isinstance(found, Mapping):
        return "it has no state_dict"
    names = {*found}
    more, less = sorted(names - expected.keys()), sorted(expected.keys() - names)
    other = [name for name in names & expected.keys() if _differ(found[name], expected[name])]
    differences = [f"it lacks {_listed(less)}"] if less else []
    differences += [f"it has {_listed(more)}"] if more else []
    differences += [f"the shape differs for {_listed(sorted(other))}"] if other else []
    return f"it is of another model: {', '.join(differences)}" if differences else ""


def _differ(found: Any, expected: Any) -> bool:
    """Whether shapes differ; unknown if an entry has no shape here, such as a tensor of another class."""
    return hasattr(found, "shape") and tuple(found.shape) != tuple(getattr(expected, "shape", ()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(repr, names[:_MOST_NAMED]))}{more}"
