from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from kaldi_io import MELS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Utterances(NamedTuple):
    features: Tensor
    lengths: Tensor
    speakers: Tensor


class TDNNLayer(nn.Module):
    def __init__(self, cin: int, cout: int, context: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, context, dilation=dilation, padding="same")
        self.norm = nn.GroupNorm(1, cout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.conv(x)))


class XVector(L.LightningModule):
    def __init__(self, speakers: int = 12, width: int = 48) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.frames = nn.ModuleList(
            [TDNNLayer(MELS, width, 5, 1), TDNNLayer(width, width, 3, 2), TDNNLayer(width, width, 3, 3)]
        )
        self.segment = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, speakers)

    def configure_model(self) -> None:
        for layer in (*self.frames, self.segment, self.output):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        x = features.transpose(1, 2)
        for layer in self.frames:
            x = layer(x)
        mask = (torch.arange(x.shape[-1], device=x.device) < lengths[:, None])[:, None].float()
        mean = (x * mask).sum(-1) / mask.sum(-1)
        var = ((x - mean[..., None]).square() * mask).sum(-1) / mask.sum(-1)
        return self.output(F.relu(self.segment(torch.cat([mean, (var + 1e-5).sqrt()], dim=1))))

    def training_step(self, batch: Utterances, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch.features, batch.lengths), batch.speakers)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.speakers))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
