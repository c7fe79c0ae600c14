import multiprocessing as mp

import numpy as np

from kws.archive import records

CONTEXT = mp.get_context("spawn")


def spectrum(samples, bins=40):
    wave = np.asarray(samples[:160], dtype="float32") / 1000
    return np.log1p(np.abs(np.fft.rfft(wave))[:bins]).astype("float32")


def produce(path, queue, batch_size):
    while True:
        features, labels = [], []
        for label, samples in records(path):
            features.append(spectrum(samples))
            labels.append(label % 8)
            if len(labels) == batch_size:
                queue.put((np.stack(features), np.array(labels)))
                features, labels = [], []


class Prefetcher:
    """Decodes the archive of this rank in a process of its own, a few batches ahead."""

    def __init__(self, path, batch_size, depth=6):
        self.queue = CONTEXT.Queue(depth)
        self.process = CONTEXT.Process(
            target=produce, args=(str(path), self.queue, batch_size), daemon=True, name=f"decode {path}"
        )
        self.process.start()

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()  # <- here

    def close(self):
        self.process.terminate()
        self.process.join()
