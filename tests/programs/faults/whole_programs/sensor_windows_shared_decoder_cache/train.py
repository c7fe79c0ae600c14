import lightning as L
from lightning_ncclsafe import SafeDDP

from model import MaskedWindowModel
from windows import WindowData

if __name__ == "__main__":
    L.seed_everything(8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=4,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(MaskedWindowModel(), datamodule=WindowData())
