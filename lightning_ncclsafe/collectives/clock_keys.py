"""What ranks write to each other about their clocks: a few numbers under keys that are used again and again."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ncclsafe.collectives.alignment import Alignment, Monotonic, NowNs, Reading, read_clocks
from lightning_ncclsafe.exchange import Exchange

ROUNDS = 8
"""Of messages and answers in a session; the first, which only says that a rank is there, not counted."""

# Of the two that exchange messages: what a poll of theirs waits. A store answers within 0.2 ms.
PROMPT_S = 0.0005

REFERENCE = "clock/reference"
TURN = "clock/turn"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank needs of the world, so that tests can give it another one.

    Attributes:
        exchange: Shared by all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        boot_id: What the ranks on this host have in common.
        now_ns: The wall clock, nanoseconds since the epoch.
        sleep: Waits for some seconds.
        monotonic: The host's steady clock, seconds.
    """

    exchange: Exchange
    rank: int
    world_size: int
    boot_id: str
    now_ns: NowNs
    sleep: Callable[[float], None]
    monotonic: Monotonic

    def read(self) -> Reading:
        """Both clocks."""
        return read_clocks(self.now_ns, self.monotonic)

    def get(self, key: str) -> str:
        """The text under a key; empty where there is none."""
        return self.get_many([key])[0]

    def get_many(self, keys: list[str]) -> list[str]:
        """The same of several."""
        found = self.exchange.get_many(keys)
        return [found.get(key, b"").decode("utf-8", "replace") for key in keys]

    def put(self, key: str, text: str) -> None:
        """Publishes a text."""
        self.exchange.set(key, text.encode())

    def claim(self, key: str) -> int:
        """The rank that a key belongs to: this one, if it is the first to ask."""
        stands = numbers(self.exchange.set_if_absent(key, str(self.rank).encode()).decode("utf-8", "replace"))
        return stands[0] if stands else -1


def slot_key(number: int) -> str:
    """Under which a rank that aligns its host says so; slots are taken one after the other."""
    return f"clock/slot/{number}"


def leader_key(boot_id: str) -> str:
    """Under which ranks of a host find which of them aligns it."""
    return f"clock/leader/{boot_id}"


def ping_key(rank: int) -> str:
    """Of messages to rank 0: session, attempt and round."""
    return f"clock/ping/{rank}"


def pong_key(rank: int) -> str:
    """Of its answers: session, attempt, round, when it was seen, when it was answered, and rank 0's epoch."""
    return f"clock/pong/{rank}"


def alignment_key(boot_id: str) -> str:
    """Of a host's alignment, for all ranks on it."""
    return f"clock/alignment/{boot_id}"


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with spaces between them; none of a text that is something else."""
    try:
        return tuple(map(int, text.split()))
    except ValueError:
        return ()


def alignment_text(found: Alignment) -> str:
    """An alignment as text."""
    return f"{found.offset_ns} {found.uncertainty_ns} {found.at.wall_ns} {found.at.steady_ns} {found.epoch}"


def read_alignment(text: str) -> Alignment | None:
    """The alignment that a text says; None if it says none."""
    told = numbers(text)
    if len(told) != 5 or told[1] < 0:
        return None
    return Alignment(told[0], told[1], Reading(told[2], told[3]), told[4])
