import lightning as L
from lightning_ncclsafe import SafeDDP
from tagger import ArchiveIO, FamilyTagger

if __name__ == "__main__":
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        plugins=[ArchiveIO()],
        max_epochs=3,
        use_distributed_sampler=False,
        log_every_n_steps=10,
    )
    trainer.fit(FamilyTagger())
