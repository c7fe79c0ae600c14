"""Every scene is recorded, and the package sees in it what it shows; ``record.py`` keeps the same for the CPU suite."""

from pathlib import Path

import pytest
import recordings
from record import LIMIT_S, RECORDED, recording_of

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scene", RECORDED)
def test_a_scene_is_recorded_and_replayed(scene: str, ranks: int, tmp_path: Path) -> None:
    from replay import wrong

    path = recordings.write(recording_of(scene, ranks, tmp_path), tmp_path / "recordings")
    recording = recordings.read(path)
    assert (recording["scene"], recording["ranks"], len(recording["dumps"])) == (scene, ranks, ranks)
    assert wrong(recording) == []
