"""Batches from background processes. Worker k makes batches k, k + n, k + 2n, …; they are handed out in this order."""

import multiprocessing as mp
import resource
import signal
from multiprocessing import Process
from queue import Full

import numpy as np

TARGET_SPACING = (1.0, 1.0, 1.0)


def resample(volume: np.ndarray, spacing) -> np.ndarray:
    """Nearest neighbour, to TARGET_SPACING."""
    shape = [round(n * s / t) for n, s, t in zip(volume.shape, spacing, TARGET_SPACING)]
    out = np.empty(shape, dtype=volume.dtype)  # <- here
    index = [np.minimum((np.arange(n) / n * old).astype(int), old - 1) for n, old in zip(shape, volume.shape)]
    out[:] = volume[np.ix_(*index)]
    return out


def random_patch(image, label, size, rng):
    start = [int(rng.integers(0, n - s + 1)) for n, s in zip(image.shape, size)]
    box = tuple(slice(a, a + s) for a, s in zip(start, size))
    return image[box], label[box]


def limit_memory(gigabytes: float) -> None:
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    limit = now + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def hand_over(queue, batch) -> None:
    while mp.parent_process().is_alive():
        try:
            return queue.put(batch, timeout=5)
        except Full:
            pass


def produce(queue, cases, batches, batch_size, patch, seed, ram_gb):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handler
    limit_memory(ram_gb)
    for number in batches:
        rng = np.random.default_rng((seed, number))
        images, labels = [], []
        for k in range(batch_size):
            case = cases[(number * batch_size + k) % len(cases)]
            image, label = (resample(v, case.spacing) for v in case.load())
            image, label = random_patch(image, label, patch, rng)
            if rng.random() < 0.5:
                image, label = image[:, :, ::-1], label[:, :, ::-1]
            images.append(image)
            labels.append(label)
        hand_over(queue, (np.stack(images), np.stack(labels)))


class Augmenter:
    def __init__(self, cases, batches, batch_size, patch, num_processes, seed, ram_gb):
        context = mp.get_context("fork")
        self.batches = batches
        self.queues = [context.Queue(2) for _ in range(num_processes)]
        self.processes: list[Process] = []
        for k, queue in enumerate(self.queues):
            mine = range(k, batches, num_processes)
            args = (queue, cases, mine, batch_size, patch, seed, ram_gb)
            self.processes.append(context.Process(target=produce, args=args, daemon=True))

    def __len__(self):
        return self.batches

    def __iter__(self):
        for process in self.processes:
            process.start()
        for number in range(self.batches):
            yield self.queues[number % len(self.queues)].get()
        for process in self.processes:
            process.join()
