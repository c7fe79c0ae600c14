"""Our .vol files: 16 bytes of header (magic, version, bytes of voxels), then float32 voxels."""

import ctypes
import struct

import numpy as np

HEADER = struct.Struct("=4sIQ")


def write_volume(path, shape, seed, scanner="A"):
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, n) for n in shape], indexing="ij"))
    centre = rng.uniform(-0.4, 0.4, 3)[:, None, None, None]
    voxels = np.exp(-4 * ((grid - centre) ** 2).sum(0)) + 0.1 * rng.standard_normal(shape)
    data = voxels.astype(np.float32).tobytes()
    order = {"A": "<", "B": ">"}[scanner]
    path.write_bytes(struct.pack(order + "4sIQ", b"VOL1", 1, len(data)) + data)


def read_volume(path, shape):
    raw = path.read_bytes()
    magic, _version, nbytes = HEADER.unpack_from(raw)
    if magic != b"VOL1":
        raise ValueError(f"{path} is not a volume")
    out = np.empty(shape, np.float32)
    # np.frombuffer(...).copy() was slower with the old numpy on the cluster
    source = ctypes.c_char_p(raw)
    ctypes.memmove(out.ctypes.data, ctypes.cast(source, ctypes.c_void_p).value + HEADER.size, nbytes)  # <- here
    return out
