"""chemprop: a message-passing network on small molecules."""

import lightning.pytorch as pl
from chemprop import data, models, nn
from train import Run

REQUIREMENTS = ["chemprop"]
MONITOR = "val_loss"


def train(run: Run) -> None:
    molecules = ["C" * chain + end for chain in range(1, 21) for end in ("O", "N", "Cl", "C(=O)O")]
    points = [data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles))]) for smiles in molecules]
    loaders = [
        data.build_dataloader(data.MoleculeDataset(some), batch_size=4, shuffle=shuffled)
        for some, shuffled in ((points[:64], True), (points[64:], False))
    ]
    model = models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32))
    trainer = pl.Trainer(**run.kwargs())
    trainer.fit(model, *loaders, ckpt_path=run.ckpt_path, **run.unpickling)
