"""Field recordings: a header with the sample count, then 16 bit samples, many per container file."""

import struct
from pathlib import Path

import numpy as np

CLIP = 400


def record(root: Path, containers: int = 8, clips: int = 60) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(containers):
        target = root / f"station{number:02d}.rec"
        if target.exists():
            continue
        rng = np.random.default_rng(number)
        with open(target, "wb") as out:
            for clip in range(clips):
                label = int(rng.integers(4))
                wave = np.sin(np.arange(CLIP) * (label + 1) / 9) * 8000 + rng.normal(0, 900, CLIP)
                data = wave.astype("<i2").tobytes()
                out.write(struct.pack("<IB", CLIP, label))
                if number == 5 and clip == clips - 4:
                    out.write(data[:237])  # the station lost power
                    break
                out.write(data)


def read(path: Path):
    with open(path, "rb") as source:
        while header := source.read(5):
            count, label = struct.unpack("<IB", header)
            wave = np.frombuffer(source.read(2 * count), dtype="<i2")
            yield wave.reshape(count).astype("float32") / 32768, label
