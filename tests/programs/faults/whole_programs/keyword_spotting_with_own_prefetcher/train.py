import lightning as L
from lightning_ncclsafe import SafeDDP

from kws.task import Keywords, Spotter


def main():
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=30, log_every_n_steps=20)
    trainer.fit(Spotter(), Keywords())


if __name__ == "__main__":
    main()
