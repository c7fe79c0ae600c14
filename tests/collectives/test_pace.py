"""How often the recorder is read."""

import pytest

from lightning_ncclsafe.collectives.timer import Pace

SIZE = 1000


def pause_s(
    *, world_size: int = 8, every: int = 50, took_s: float = 1.0, cpu_s: float = 0.0, new: int = 10, steps: int = 10
) -> float:
    pace = Pace(world_size=world_size, every_n_steps=every, recorder_size=SIZE)
    return pace.pause_s(took_s=took_s, cpu_s=cpu_s, new=new, steps=steps)


@pytest.mark.parametrize(
    ("seen", "expected_s"),
    [
        # 10 steps a second, and 50 are wanted: twice in that time.
        ({}, 2.5),
        ({"every": 20}, 1.0),
        ({"every": 1}, 0.5),
        ({"every": 40, "took_s": 0.5}, 1.0),
        # Not more seldom than every 5 s, should steps be slow or not come at all.
        ({"every": 500}, 5.0),
        ({"steps": 0}, 5.0),
        # Not more often than 10 ms for each rank.
        ({"every": 1, "world_size": 200}, 2.0),
        ({"every": 1, "world_size": 1024}, 10.24),
        # A fiftieth of a core.
        ({"every": 1, "cpu_s": 0.02}, 1.0),
        ({"every": 1, "cpu_s": 0.16}, 8.0),
        # Of 1,000 entries of which 300 are new in a second 600 are so after 2 s.
        ({"new": 300}, 2.0),
        ({"new": 300, "cpu_s": 0.1}, 2.0),
        # Where it was full nobody knows how many there were.
        ({"new": 1000}, 0.5),
        ({"new": 1000, "took_s": 0.2, "steps": 2}, 0.1),
        ({"new": 1000, "took_s": 0.01}, 0.05),
        ({"new": 0}, 2.5),
    ],
)
def test_the_pause_depends_on_recent_readings(seen: dict[str, float], expected_s: float) -> None:
    assert pause_s(**seen) == pytest.approx(expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [10, 1_000, 10_000])
@pytest.mark.parametrize("world_size", [2, 1024])
def test_reading_keeps_up_with_the_ring(rate: int, world_size: int) -> None:
    """From the start, and after a reading that came too late."""
    pace = Pace(world_size=world_size, every_n_steps=50, recorder_size=SIZE)
    pause, lost = 0.1, []
    for _ in range(200):
        reading_s = 0.007
        new = rate * (pause + reading_s)
        lost.append(max(new - SIZE, 0))
        pause = pace.pause_s(
            took_s=pause + reading_s, cpu_s=reading_s, new=int(min(new, SIZE)), steps=int(rate * pause / 10)
        )
    assert not any(lost[10:])


def test_reading_catches_up_when_calls_become_faster() -> None:
    pace, pause, lost = Pace(world_size=2, every_n_steps=50, recorder_size=SIZE), 5.0, []
    for turn in range(30):
        new = (100 if turn < 5 else 5_000) * pause
        lost.append(new > SIZE)
        pause = pace.pause_s(took_s=pause, cpu_s=0.007, new=int(min(new, SIZE)), steps=10)
    assert sum(lost) <= 8 and not any(lost[-10:])


@pytest.mark.parametrize("rate", [10, 100, 200])
def test_reading_stays_within_its_share_of_a_core(rate: int) -> None:
    pace, pause, cpu_s, passed_s = Pace(world_size=2, every_n_steps=1, recorder_size=SIZE), 0.1, 0.0, 0.0
    for _ in range(100):
        passed_s += pause
        cpu_s += 0.02
        pause = pace.pause_s(took_s=pause, cpu_s=0.02, new=int(rate * pause), steps=int(rate * pause))
    assert cpu_s / passed_s <= 0.0215


@pytest.mark.parametrize(("world_size", "share_s"), [(1, 0.5), (8, 0.5), (200, 2.0), (1024, 10.24)])
def test_ranks_share_less_often_in_larger_jobs(world_size: int, share_s: float) -> None:
    assert Pace(world_size=world_size, every_n_steps=50, recorder_size=SIZE).share_s == pytest.approx(share_s)


def test_there_is_always_a_pause() -> None:
    for new in (0, 1, 10**9):
        assert pause_s(every=1, took_s=1e-6, new=new, steps=10**6) >= 0.05


def test_a_disabled_recorder_is_polled_rarely() -> None:
    pace = Pace(world_size=2, every_n_steps=50, recorder_size=0)
    assert pace.pause_s(took_s=0.5, cpu_s=0.001, new=0, steps=10) == pytest.approx(1.25)
