import logging
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from policy.env import Corridor
from policy.nets import PolicyNet
from policy.rollout import collect

log = logging.getLogger(__name__)


class Reinforce(L.LightningModule):
    def __init__(self, gamma: float = 0.97, lr: float = 3e-3, video_every: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = PolicyNet()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net.body, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def on_fit_start(self):
        self.env = Corridor(seed=1 + self.global_rank)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        obs, action, reward = collect(self.net, self.env)
        returns, total = torch.zeros_like(reward), 0.0
        for t in reversed(range(len(reward))):
            total = reward[t] + self.hparams.gamma * total
            returns[t] = total
        logp = torch.distributions.Categorical(logits=self.net(obs)).log_prob(action)
        loss = -(logp * (returns - returns.mean())).mean()
        opt.zero_grad()
        self.manual_backward(loss)
        if not torch.isfinite(loss):
            log.warning("loss is %s", loss)
        opt.step()
        self.log("return", returns[0].mean(), prog_bar=True, sync_dist=True)

    def on_train_epoch_end(self):
        if self.current_epoch % self.hparams.video_every == 0:
            if self.trainer.is_global_zero:
                self._render()
            self.trainer.strategy.barrier()

    def _render(self):
        """Encodes a video of an episode in a process of its own."""
        out = Path("videos") / f"epoch{self.current_epoch}.txt"
        out.parent.mkdir(exist_ok=True)
        code = "import time\nfor i in range(60):\n    print('frame', i, flush=True)\n    time.sleep(0.1)"
        with out.open("w") as f:
            encoder = subprocess.Popen([sys.executable, "-c", code], stdout=f)
        while encoder.poll() is None:
            time.sleep(0.2)

    def train_dataloader(self):
        return DataLoader(range(90), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), self.hparams.lr)
