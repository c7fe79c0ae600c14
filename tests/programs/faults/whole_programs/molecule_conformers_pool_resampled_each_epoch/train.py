import lightning as L
from lightning_ncclsafe import SafeDDP

from mol.data import ConformerData
from mol.model import RadiusModel

if __name__ == "__main__":
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=10,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=5,
    )
    trainer.fit(RadiusModel(), datamodule=ConformerData())
