import lightning as L
from lightning_ncclsafe import SafeDDP

from docs_ml.data import DocumentData
from docs_ml.module import DocumentClassifier

if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=6, log_every_n_steps=5)
    trainer.fit(DocumentClassifier(), datamodule=DocumentData())
