import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from molprop.data import Molecules, build_vocab, random_smiles
from molprop.experiment import Experiment, global_rank
from molprop.model import PropertyRegressor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="esol")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-epochs", type=int, default=4)
    args = parser.parse_args()
    L.seed_everything(0)

    experiment = Experiment(args.name)
    smiles = random_smiles(2000, seed=0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.max_epochs,
        default_root_dir=str(experiment.dir),
    )
    if global_rank() == 0:
        experiment.publish_vocab(build_vocab(smiles))
    vocab = experiment.wait_for_vocab()

    train = DataLoader(Molecules(smiles[:1600], vocab), batch_size=16, shuffle=True)
    val = DataLoader(Molecules(smiles[1600:], vocab), batch_size=16)
    trainer.fit(PropertyRegressor(len(vocab)), train, val)


if __name__ == "__main__":
    main()
