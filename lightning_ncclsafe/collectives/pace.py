"""How often the recorder is read: often enough that it forgets nothing, and no more often than somebody wants it."""

_SHORTEST_S = 0.5
# Of one core so much may be spent on reading and judging: a full recorder takes some milliseconds, with the GIL held.
_MOST_OF_A_CORE = 0.02
_LONGEST_S = 5.0
# A recorder is read before so much of it is new.
_FULL = 0.6
# The store that all ranks share is asked for a few things by each rank each time: a few hundred times a second.
_RANKS_PER_S = 100.0


class Pace:
    """Says how long to wait, from what was seen so far.

    Args:
        world_size: Number of ranks.
        every_n_steps: After how many steps the user wants to know.
        recorder_size: Entries that the recorder keeps.
    """

    def __init__(self, *, world_size: int, every_n_steps: int, recorder_size: int) -> None:
        self.share_s = max(_SHORTEST_S, world_size / _RANKS_PER_S)
        """How often ranks share what they have read, seconds."""
        self._every_n_steps = every_n_steps
        self._recorder_size = recorder_size

    def pause_s(self, *, took_s: float, cpu_s: float, new: int, steps: int) -> float:
        """Seconds until the next reading.

        Args:
            took_s: Seconds since the last one.
            cpu_s: Processor time that the last one has taken, seconds.
            new: Entries that were new.
            steps: Steps that were made meanwhile.
        """
        # What one rank has read reaches rank 0 a turn later: so twice for each time that somebody looks.
        wanted_s = self._every_n_steps * took_s / steps / 2 if steps else _LONGEST_S
        full_s = self._full_s(took_s, new)
        least_s = max(self.share_s, cpu_s / _MOST_OF_A_CORE)
        return max(min(max(wanted_s, least_s), full_s, max(_LONGEST_S, least_s)), _SHORTEST_S / 10)

    def _full_s(self, took_s: float, new: int) -> float:
        """After how long the recorder may be full."""
        if not new or not self._recorder_size:
            return _LONGEST_S
        # Half as long at once where it was full, and so had probably forgotten some.
        is_full = new >= self._recorder_size
        return took_s / 2 if is_full else _FULL * self._recorder_size * took_s / new
