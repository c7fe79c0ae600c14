"""Log-spectrograms of recordings, computed in helper processes."""

import multiprocessing as mp
import resource
from pathlib import Path

import numpy as np

FRAME, HOP = 256, 64
CPU_SECONDS = 3  # some field recorders write files that never end


def _limit():
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def denoise(frames: np.ndarray, passes: int) -> np.ndarray:
    for _ in range(passes):
        frames = frames - 0.05 * np.median(np.abs(frames), axis=1, keepdims=True)
    return frames


def log_spectrogram(path: str) -> np.ndarray:
    wave = np.load(path)
    starts = np.arange(0, len(wave) - FRAME, HOP)
    frames = wave[starts[:, None] + np.arange(FRAME)]
    frames = denoise(frames, passes=1 + len(wave) // 4000)
    spec = np.log1p(np.abs(np.fft.rfft(frames * np.hanning(FRAME))))
    return spec[:128].astype(np.float32)


class FeatureCache:
    def __init__(self, files: list, processes: int = 2):
        self.files = files
        self.pool = mp.get_context("fork").Pool(processes, initializer=_limit)
        self.specs = []

    def refresh(self, names: list) -> None:
        self.specs = self.pool.map(log_spectrogram, names, chunksize=1)  # <- here
