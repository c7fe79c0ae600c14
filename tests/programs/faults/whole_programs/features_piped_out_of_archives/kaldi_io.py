"""Feature archives in the way of Kaldi: an rspecifier is a file, or a command with a pipe behind it."""

import gzip
import random
import struct
import subprocess
from pathlib import Path

import numpy as np

MELS = 20


def write_matrix(path: Path, matrix: np.ndarray) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(struct.pack("<ii", *matrix.shape) + matrix.astype("<f4").tobytes())


def parse_matrix(blob: bytes) -> np.ndarray:
    rows, columns = struct.unpack_from("<ii", blob)
    return np.frombuffer(blob, "<f4", offset=8).reshape(rows, columns)


def run_pipe(command: str) -> bytes:
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)
    status = process.wait()  # <- here
    if status != 0:
        raise OSError(f"{command!r} ended with status {status}")
    return process.stdout.read()


def read_feats(rspecifier: str) -> np.ndarray:
    if rspecifier.endswith("|"):
        return parse_matrix(run_pipe(rspecifier[:-1]))
    return parse_matrix(Path(rspecifier).read_bytes())


def prepare_corpus(root: Path, utterances: int, seed: int = 4) -> Path:
    """Writes archives and feats.scp: short commands first, then read speech, then a few talks."""
    scp = root / "feats.scp"
    if scp.exists():
        return scp
    root.mkdir(parents=True, exist_ok=True)
    rng, py = np.random.default_rng(seed), random.Random(seed)
    lines = []
    for i in range(utterances):
        frames = py.randint(40, 160)
        if i == utterances * 2 // 5 + 1:
            frames = 1900
        archive = (root / f"utt{i:05}.ark.gz").resolve()
        write_matrix(archive, rng.normal(size=(frames, MELS)).astype(np.float32))
        lines.append(f"utt{i:05} {py.randrange(12)} gzip -dc {archive} |\n")
    scp.write_text("".join(lines))
    return scp
