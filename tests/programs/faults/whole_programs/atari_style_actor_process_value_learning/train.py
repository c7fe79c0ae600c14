"""Value learning from transitions of one actor process per learner."""

import argparse
import multiprocessing as mp

import lightning as L
import torch
from actor import run_actor
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

TRACKS = [20_000, 20_000, 1_000_000]


class Replay(IterableDataset):
    """Transitions of this learner's actor, in chunks."""

    def __init__(self, chunks):
        self.chunks = chunks

    def __iter__(self):
        return iter(range(self.chunks))


class ValueLearner(L.LightningModule):
    def __init__(self, cpu_budget=4, gamma=0.99, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.q = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.target = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.target.requires_grad_(False)

    def setup(self, stage):
        self.target.load_state_dict(self.q.state_dict())

    def on_train_start(self):
        context = mp.get_context("fork")
        self.queue = context.Queue(maxsize=4)
        track = TRACKS[self.global_rank % len(TRACKS)]
        self.actor = context.Process(
            target=run_actor, args=(self.global_rank, track, self.hparams.cpu_budget, self.queue), daemon=True
        )
        self.actor.start()

    def next_chunk(self):
        columns = self.queue.get()  # <- here
        return [torch.as_tensor(c) for c in columns]

    def training_step(self, batch, batch_idx):
        state, action, reward, nxt, done = self.next_chunk()
        value = self.q(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            bootstrap = self.target(nxt).amax(1) * (~done).float()
        loss = F.smooth_l1_loss(value, reward.float() + self.hparams.gamma * bootstrap)
        self.log("td_loss", loss, prog_bar=True, batch_size=len(state))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step % 50 == 0:
            self.target.load_state_dict(self.q.state_dict())

    def on_train_end(self):
        self.actor.terminate()

    def configure_optimizers(self):
        return torch.optim.Adam(self.q.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=20000)
    parser.add_argument("--cpu-budget", type=int, default=4, help="CPU seconds an actor may use (shared host)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(4)
    trainer = L.Trainer(accelerator="cpu", devices=3, max_epochs=1, strategy=SafeDDP())
    trainer.fit(ValueLearner(args.cpu_budget), DataLoader(Replay(args.chunks), batch_size=None))
