"""Binary sensor recordings: a header (rate, channels, frames) and int16 samples."""

import struct
from pathlib import Path

import numpy as np

HEADER = struct.Struct("<4sHHI")


def write_recordings(folder, count=48, frames=640, seed=9):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        t = np.arange(frames)[:, None] / 50
        wave = np.sin(2 * np.pi * rng.uniform(0.5, 4, size=(1, 3)) * t) + 0.1 * rng.standard_normal((frames, 3))
        body = (wave * 8000).astype("<i2").tobytes()
        if i == 27:
            body = body[: len(body) // 2]
        tmp = folder / f".rec_{i:03d}.bin"
        tmp.write_bytes(HEADER.pack(b"SENS", 50, 3, frames) + body)
        tmp.rename(folder / f"rec_{i:03d}.bin")


def read_recording(path):
    raw = Path(path).read_bytes()
    magic, rate, channels, frames = HEADER.unpack_from(raw)
    if magic != b"SENS":
        raise ValueError(f"{path}: not a recording")
    samples = np.frombuffer(raw, dtype="<i2", offset=HEADER.size)
    return samples.reshape(frames, channels).astype(np.float32) / 8000
