import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Encoder(nn.Module):
    def __init__(self, vocabulary, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(depth)]
        )

    def forward(self, tokens):
        hidden, padding = self.embedding(tokens), tokens == 0
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        weight = (~padding).unsqueeze(-1).to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)


class IntentClassifier(L.LightningModule):
    def __init__(self, vocabulary, classes, width=64, depth=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(classes, average="micro")
        self.mean_loss = MeanMetric()

    def configure_model(self):
        if hasattr(self, "encoder"):
            return
        self.encoder = Encoder(self.hparams.vocabulary, self.hparams.width, self.hparams.depth)
        self.classifier = nn.Linear(self.hparams.width, self.hparams.classes)
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.encoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.encoder, mesh=mesh, mp_policy=policy)
        fully_shard(self.classifier, mesh=mesh, mp_policy=policy)

    def forward(self, tokens):
        return self.classifier(self.encoder(tokens))

    def training_step(self, batch, batch_idx):
        tokens, intent = batch
        loss = nn.functional.cross_entropy(self(tokens), intent, label_smoothing=0.05)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, intent = batch
        logits = self(tokens)
        self.mean_loss.update(nn.functional.cross_entropy(logits, intent))
        self.accuracy.update(logits, intent)
        self.log("val_loss", self.mean_loss)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
