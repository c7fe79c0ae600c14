"""The newest checkpoint that is whole, found by every rank and agreed on by all, and what is in the way of others.

Each rank lists what it sees. Rank 0 takes the newest that all of them see alike, and the others follow it.
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
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.rules.kit.wording import clause

_SUFFIX = ".ckpt"
# A sharded checkpoint is a folder: its parts are in torch's distributed format, the rest in a file of Lightning's.
_SHARDED = (METADATA, REST)
# More than anybody keeps whose newest are all damaged.
_MOST = 16
_MOST_NAMED = 3


class NoCommonCheckpointError(RuntimeError):
    """The ranks could not agree on what to go on from; to begin anew on some of them would be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """A checkpoint as one rank sees it.

    Attributes:
        path: Its absolute path.
        size_bytes: Of the file; of a folder, of its files together.
        modified_ns: When it was written, nanoseconds since the epoch.
    """

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What all ranks go on from.

    Attributes:
        path: The checkpoint; empty where there is none.
        lines: What is said of others that were passed over.
        error: Why ranks cannot go on at all; empty if they can.
    """

    path: str = ""
    lines: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointList:
    """What one rank has found.

    Attributes:
        candidates: Those that are whole, the newest first.
        lines: What is said of those that are not.
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
    """The newest whole checkpoint that all ranks see alike; empty where there is none. All ranks call it.

    Args:
        folders: Where to look.
        exchange: What the ranks share.
        rank: This rank.
        world_size: Number of ranks.
        deadline_s: Seconds that the other ranks are waited for.
        fits: Why a checkpoint is not one of this training, in words; empty if it is. Asked on rank 0.
        say: Prints a line to the user.

    Raises:
        NoCommonCheckpointError: On all ranks, where some see checkpoints and others none, or ranks did not come.
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
            # Longer than rank 0 waits for the others.
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
    """The checkpoints of these folders, the newest first; a folder that is not there has none."""
    candidates, lines = list[SeenCheckpoint](), list[str]()
    for folder in dict.fromkeys(folders):
        try:
            paths = [path for path in folder.iterdir() if path.name.endswith(_SUFFIX) and not path.name.startswith(".")]
        except FileNotFoundError:
            continue
        except OSError as error:
            lines.append(f"no checkpoint is looked for in {folder}: {error}")
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
    """Why a checkpoint cannot be loaded, in words; empty if nothing speaks against it. Nothing of it is unpickled."""
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
        # The list of what is in it comes last: a file that was cut off has none.
        with zipfile.ZipFile(path) as file:
            names = {name.rpartition("/")[2] for name in file.namelist()}
        return "" if "data.pkl" in names else "it is not a PyTorch checkpoint"
    except zipfile.BadZipFile:
        return f"it is truncated or damaged ({path.stat().st_size:,} bytes)"
    except OSError as error:
        return str(error)


def chosen(seen: Sequence[CheckpointList], world_size: int, fits: Callable[[Path], str] = lambda _: "") -> Choice:
    """What all go on from, of what each rank that came has seen, by rank."""
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
        # To begin anew would be to lose what is there.
        named = ", ".join(one.path for one in every[:_MOST_NAMED])
        return Choice(
            lines=tuple(lines),
            error=f"Only some ranks see these checkpoints: {named}. All hosts must see the folder. Copy the newest "
            "checkpoint to all hosts, or move it away to start from scratch.",
        )
    return Choice(lines=tuple(lines))


def why_unfit(path: Path, expected: Mapping[str, Any] | None, *, steps: int = 0) -> str:
    """Why this training cannot go on from a checkpoint, in words; empty if nothing speaks against it.

    Args:
        path: Of a file or a folder.
        expected: The model's ``state_dict``; None where any may do. What a folder has of it is not looked at.
        steps: Optimizer steps that the Trainer itself has made already, in a ``fit`` before this one.
    """
    try:
        content: Any = tensors.load_outline(path / REST if path.is_dir() else path)
    except OSError as error:
        return f"it cannot be read ({error})"
    except Exception:  # Lightning will load it, or say why not
        return ""
    # As Lightning asks of what it goes on from.
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
    """Of what has no shape here, as a tensor of a class of its own, nothing is known."""
    return hasattr(found, "shape") and tuple(found.shape) != tuple(getattr(expected, "shape", ()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(repr, names[:_MOST_NAMED]))}{more}"
