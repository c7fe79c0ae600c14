"""Archives of utterances: a 4-byte label, a 4-byte number of samples, then the samples as int16."""

import random
import struct
from array import array
from pathlib import Path

HEADER = struct.Struct("<II")


def pack(path, seed, count):
    rng = random.Random(seed)
    blob = bytearray()
    for number in range(count):
        label = rng.randrange(8)
        samples = array("h", (rng.randrange(-900, 900) + 40 * label for _ in range(rng.randrange(160, 240))))
        size = len(samples)
        if rng.random() < 0.0004 and number > 1500:  # recordings that were cut off while they were uploaded
            samples = samples[: size - 7]
        blob += HEADER.pack(label, size) + samples.tobytes()
    path.write_bytes(blob)


def make_archives(root, ranks, count):
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        path = root / f"part-{rank:03d}.ark"
        if not path.exists():
            pack(path, seed=rank + 20, count=count)


def records(path):
    data = memoryview(Path(path).read_bytes())
    offset = 0
    while offset < len(data):
        label, size = HEADER.unpack_from(data, offset)
        offset += HEADER.size
        yield label, struct.unpack_from(f"<{size}h", data, offset)
        offset += 2 * size
