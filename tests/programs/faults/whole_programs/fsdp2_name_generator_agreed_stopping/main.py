import lightning as L
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from generator import NameModel
from names import Names
from report import EpochReport

if __name__ == "__main__":
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=6,
        callbacks=[EpochReport()],
        log_every_n_steps=10,
    )
    trainer.fit(NameModel(), DataLoader(Names(640, 1), 16, shuffle=True), DataLoader(Names(48, 2), 12))
