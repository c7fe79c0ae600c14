"""Kills loader workers at random instants, and says whether every sample still comes, once and in order.

    python tests/programs/benchmarks/killed_workers.py [--fork 450] [--spawn 50] [--seed 0] [--load 2]

Each trial reads one epoch with 1 to 4 workers, and kills one or all of them at a random instant: while they start, make
a batch, hold a lock, send, or end. Where the user has not asked for these workers, their batches have to be made again;
where they are the user's own, the epoch may end with an error that names the signal. Somebody else reaps some of the
dead, so that only their end can be noticed, but not their exit status. A trial that takes a minute has hung: its stack
is printed, and the exit status is 1.
"""

import argparse
import faulthandler
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe.loaders.tuning.measuring import Observer
from lightning_ncclsafe.loaders.tuning.resizing import ResizableLoader

HANGS_AFTER_S = 60.0
SAMPLES = 48
BATCH = 3


class Samples(Dataset[Any]):
    """Tensors, which are handed over by the worker that has made them, and bytes that do not fit into a pipe."""

    def __init__(self, item_bytes: int, item_s: float) -> None:
        self.item_bytes = item_bytes
        self.item_s = item_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.item_s)
        return index, torch.full((8,), index), bytes(self.item_bytes)


def columns(samples: list[Any]) -> Any:
    indices, tensors, blobs = zip(*samples, strict=True)
    return indices, torch.stack(tensors), blobs


class Killer(threading.Thread):
    """Kills workers of this process once, after a while."""

    def __init__(self, after_s: float, *, every: bool, reaps: bool) -> None:
        super().__init__(daemon=True)
        self.after_s, self.every, self.reaps = after_s, every, reaps
        self.killed_at: float | None = None
        self.is_over = threading.Event()
        self._before = {child.pid for child in psutil.Process().children()}

    def run(self) -> None:
        if self.is_over.wait(self.after_s):
            return
        workers = [child for child in psutil.Process().children() if child.pid not in self._before]
        random.shuffle(workers)
        for worker in workers if self.every else workers[:1]:
            with suppress(psutil.Error):
                if any("resource_tracker" in part for part in worker.cmdline()):
                    continue
                worker.kill()
                self.killed_at = self.killed_at or time.monotonic()
                if self.reaps:
                    with suppress(ChildProcessError):
                        os.waitpid(worker.pid, 0)


class Trial:
    def __init__(self, method: str, most_s: float) -> None:
        self.workers = random.randint(1, 4)
        self.is_users = random.random() < 0.3
        samples = Samples(random.choice([1, 1, 100_000]), random.choice([0.0, 0.001, 0.004]))
        self.loader: DataLoader[Any] = DataLoader(
            samples,
            batch_size=BATCH,
            collate_fn=columns,
            num_workers=self.workers if self.is_users else 0,
            persistent_workers=self.is_users and random.random() < 0.5,
            multiprocessing_context=method if self.is_users else None,
        )
        if not self.is_users:
            vars(self.loader)["_DataLoader__multiprocessing_context"] = multiprocessing.get_context(method)
        self.killer = Killer(random.uniform(0, most_s), every=random.random() < 0.3, reaps=random.random() < 0.5)
        self.noticed_at: float | None = None
        self.step_s = random.choice([0.0, 0.0, 0.002])

    def run(self) -> str:
        """How it ended: ``"undisturbed"``, ``"made again"``, ``"raised"``, or what is wrong."""
        observer = Observer(lambda _: None)
        tuned = ResizableLoader(self.loader, observer, user_workers=self.loader.num_workers, say=self._said)
        tuned.resize(self.workers)
        self.killer.start()
        seen: list[int] = []
        raised = ""
        try:
            for indices, tensor, _ in tuned.begin():
                seen.extend(indices)
                assert tensor[:, 0].tolist() == [*indices]
                time.sleep(self.step_s)
        except RuntimeError as error:
            self._said(str(error))
            raised = str(error)
        tuned.close()
        self.killer.is_over.set()
        self.killer.join()
        return self._verdict(seen, raised)

    def _said(self, _: str) -> None:
        self.noticed_at = time.monotonic()

    def _verdict(self, seen: list[int], raised: str) -> str:
        if seen != [*range(len(seen))]:
            return f"WRONG: {seen}"
        if raised:
            named = "is killed by signal: Killed" in raised or "exit status is unknown" in raised
            return "raised" if self.is_users and named else f"WRONG: {raised}"
        if len(seen) != SAMPLES:
            return f"WRONG: {len(seen)} samples"
        return "made again" if self.noticed_at is not None else "undisturbed"

    @property
    def noticed_s(self) -> float | None:
        both = self.killer.killed_at, self.noticed_at
        return None if both[0] is None or both[1] is None else both[1] - both[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", type=int, default=450, help="trials with forked workers")
    parser.add_argument("--spawn", type=int, default=50, help="trials with spawned workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="programs that burn a core each meanwhile")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.load)]
    try:
        return sum(trials(method, getattr(arguments, method)) for method in ("fork", "spawn")) > 0
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def trials(method: str, count: int) -> int:
    """Runs them, prints a line about them, and returns how many went wrong."""
    verdicts: Counter[str] = Counter()
    noticed_s, killed, wrong, most_s = [], 0, 0, 1.0
    while killed < count:
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        trial, began = Trial(method, most_s), time.monotonic()
        verdict = trial.run()
        if trial.killer.killed_at is None:  # it was over before: about so long takes one that is not disturbed
            most_s = time.monotonic() - began
            continue
        killed += 1
        verdicts[verdict.partition(":")[0]] += 1
        if verdict.startswith("WRONG"):
            wrong += 1
            print(f"{method}, trial {killed}: {verdict}", flush=True)
        if trial.noticed_s is not None:
            noticed_s.append(trial.noticed_s)
    faulthandler.cancel_dump_traceback_later()
    latest = (
        f"; noticed after {statistics.median(noticed_s):.2f} s, at most {max(noticed_s):.2f} s" if noticed_s else ""
    )
    print(f"{method}: {killed} killed: {dict(verdicts)}{latest}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
