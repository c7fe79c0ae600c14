"""Q-learning with a replay buffer that actor processes fill before the first update."""

import argparse
import multiprocessing
import queue
import random
import threading
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP


def act(transitions, stop, seed: int):
    """An actor: a random walk on a line with a reward at its end."""
    rng = random.Random(seed)
    position = 0
    while not stop.is_set():
        action = rng.randrange(2)
        target = max(-5, min(5, position + (1 if action else -1)))
        try:
            transitions.put((position, action, float(target == 5), target), timeout=1)
        except queue.Full:
            continue
        position = 0 if target == 5 else target
        time.sleep(0.01)


class ReplayBuffer:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rows = []
        self.lock = threading.Lock()

    def add(self, row):
        with self.lock:
            if len(self.rows) >= self.capacity:
                self.rows.pop(0)
            self.rows.append(row)

    def sample(self, count: int):
        with self.lock:
            rows = random.choices(self.rows, k=count)
        return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows)]

    def __len__(self):
        return len(self.rows)


class Experience(IterableDataset):
    def __init__(self, buffer: ReplayBuffer, batch_size: int, batches: int, warmup: int):
        self.buffer = buffer
        self.batch_size = batch_size
        self.batches = batches
        self.warmup = warmup

    def __len__(self):
        return self.batches

    def __iter__(self):
        while len(self.buffer) < self.warmup:
            time.sleep(0.2)
        for _ in range(self.batches):
            yield self.buffer.sample(self.batch_size)


class Actors(Callback):
    def __init__(self, buffer: ReplayBuffer, count: int = 1):
        self.buffer = buffer
        self.count = count

    def on_fit_start(self, trainer, pl_module):
        context = multiprocessing.get_context("fork")
        self.transitions = context.Queue(maxsize=64)
        self.stop = context.Event()
        self.processes = [
            context.Process(target=act, args=(self.transitions, self.stop, 10 * trainer.global_rank + i), daemon=True)
            for i in range(self.count)
        ]
        for process in self.processes:
            process.start()
        self.thread = threading.Thread(target=self.drain, name="replay", daemon=True)
        self.thread.start()

    def drain(self):
        while not self.stop.is_set():
            try:
                self.buffer.add(self.transitions.get(timeout=0.5))
            except queue.Empty:
                continue

    def on_fit_end(self, trainer, pl_module):
        self.stop.set()
        self.thread.join()
        for process in self.processes:
            process.terminate()
            process.join()


class QAgent(L.LightningModule):
    def __init__(self, gamma: float = 0.9, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.q = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        state, action, reward, target = batch
        with torch.no_grad():
            future = self.q(target[:, None]).max(dim=1).values
        value = self.q(state[:, None]).gather(1, action.long()[:, None]).flatten()
        loss = F.smooth_l1_loss(value, reward + self.hparams.gamma * future)
        self.log_dict({"loss": loss, "reward": reward.mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1)
    buffer = ReplayBuffer(20000)
    loader = DataLoader(Experience(buffer, 32, 60, args.warmup), batch_size=None)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[Actors(buffer)],
        log_every_n_steps=10,
    )
    trainer.fit(QAgent(), loader)
