"""What an offload needs to know about one kind of logger."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.loggers.delivery import Sink
from lightning_ncclsafe.loggers.frames import LogFrame
from lightning_ncclsafe.loggers.intake import Call
from lightning_ncclsafe.loggers.thinning import Scalars

if TYPE_CHECKING:
    from lightning_ncclsafe.loggers.offload import Offload


FIRST_S = 0.5
"""How long the first log waits for its file: who looks whether there is one finds it, as without an offload."""


class Backend(Protocol):
    """One kind of logger.

    Attributes:
        path: Where it writes, for people.
        folders: Directories of this host in which a program may read what it has written, absolute.
        file_names: The files that it writes there, by a part of their names.
    """

    path: str
    folders: tuple[str, ...]
    file_names: tuple[str, ...]

    @property
    def sink(self) -> Sink:
        """Where its frames go."""

    def attach(self, offload: "Offload") -> None:
        """Puts itself between the logger and its callers."""

    def detach(self) -> None:
        """The logger's methods are its own again; also after an ``attach`` that failed half-way.

        In the first case the offload is closed by now, and what was accepted is delivered after this.
        """

    def scalars(self, scalars: Sequence[Scalars]) -> list[LogFrame]:
        """What points become; on the staging thread."""

    def call(self, call: Call) -> list[LogFrame]:
        """What a call becomes; on the staging thread, or that of media."""

    def finalize(self, status: str) -> None:
        """The logger's own finalize; after ``detach``, or in the middle of a run."""

    def close(self) -> None:
        """Everything has been delivered: the logger learns what it has to know, and nothing is left running."""


class Replacements:
    """Methods of a logger and of its experiment that are replaced for a while."""

    def __init__(self) -> None:
        self._replaced: list[ReplacedMethod] = []

    def replace(self, owner: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a method; returns the one that was there.

        Raises:
            AttributeError: If the owner does not have it, or does not let it be replaced.
        """
        replaced = ReplacedMethod(owner, name, call)
        # At once, so that it is undone when the next one fails.
        self._replaced.append(replaced)
        return replaced.original

    def undo(self) -> None:
        """All methods are as they were."""
        while self._replaced:
            self._replaced.pop().remove()
