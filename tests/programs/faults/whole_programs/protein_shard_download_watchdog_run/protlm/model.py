import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from protlm.shards import ProteinShard, fill_store, letter_frequencies


class ProteinLM(L.LightningModule):
    def __init__(self, width: int = 64, mask_rate: float = 0.15):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(21, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 20)
        self.register_buffer("prior", torch.zeros(20))

    def prepare_data(self):
        fill_store()

    def setup(self, stage):
        if self.global_rank == self.trainer.world_size - 1:
            self.prior.copy_(letter_frequencies().log())
        self.train_set = ProteinShard(self.global_rank)

    def on_fit_start(self):
        self.prior = self.trainer.strategy.broadcast(self.prior, src=self.trainer.world_size - 1)

    def training_step(self, ids, batch_idx):
        masked = torch.rand(ids.shape) < self.hparams.mask_rate
        logits = self.head(self.encoder(self.embed(ids.masked_fill(masked, 20)))) + self.prior
        loss = nn.functional.cross_entropy(logits[masked], ids[masked])
        self.log("mlm", loss, prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-4)
