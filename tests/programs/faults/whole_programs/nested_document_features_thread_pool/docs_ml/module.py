import lightning as L
import torch
import torch.nn as nn

from .features import DIM, FeatureExtractor


class DocumentClassifier(L.LightningModule):
    def __init__(self, lr=1e-2, feature_workers=2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))

    def setup(self, stage):
        self.extractor = FeatureExtractor(self.hparams.feature_workers)

    def _features(self, docs):
        futures = [self.extractor.submit(d) for d in docs]
        return torch.stack([f.result() for f in futures]), torch.tensor([d["label"] for d in docs])

    def training_step(self, docs, batch_idx):
        x, y = self._features(docs)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(docs))
        return loss

    def validation_step(self, docs, batch_idx):
        x, y = self._features(docs)
        acc = (self.net(x).argmax(-1) == y).float().mean()
        self.log("val_acc", acc, sync_dist=True, prog_bar=True, batch_size=len(docs))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
