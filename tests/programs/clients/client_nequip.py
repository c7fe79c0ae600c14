"""nequip: a potential of copper, trained on forces (so with a second derivative), from a config."""

import lightning.pytorch as pl
from nequip.data.datamodule import NequIPDataModule
from nequip.train import EMALightningModule
from nequip.utils.global_state import set_global_state
from train import SEED, Run

REQUIREMENTS = ["nequip"]
MONITOR = "val0_epoch/weighted_sum"
ELEMENTS = ["Cu"]
RADIUS = 4.0


def train(run: Run) -> None:
    set_global_state()
    transforms = "nequip.data.transforms"
    dataset = {
        "_target_": "nequip.data.dataset.EMTTestDataset",
        "supercell": [1, 1, 1],
        "element": "Cu",
        "num_frames": 48,
        "seed": SEED,
        "transforms": [
            {
                "_target_": f"{transforms}.ChemicalSpeciesToAtomTypeMapper",
                "model_type_names": ELEMENTS,
                "chemical_species_to_atom_type_map": {"Cu": "Cu"},
            },
            {"_target_": f"{transforms}.NeighborListTransform", "r_max": RADIUS},
        ],
    }
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 2}
    data = NequIPDataModule(
        seed=SEED,
        split_dataset={"dataset": dataset, "train": 40, "val": 8},
        train_dataloader=loader | {"shuffle": True},
        val_dataloader=loader,
    )
    errors = {"total_energy": 1.0, "forces": 1.0}
    model = {
        "_target_": "nequip.model.NequIPGNNModel",
        "seed": SEED,
        "model_dtype": "float32",
        "type_names": ELEMENTS,
        "r_max": RADIUS,
        "l_max": 1,
        "parity": True,
        "num_layers": 1,
        "num_features": 4,
        "radial_mlp_depth": 1,
        "radial_mlp_width": 8,
        "avg_num_neighbors": 12.0,
        "per_type_energy_shifts": 0.0,
        "per_type_energy_scales": 1.0,
    }
    trainer = pl.Trainer(**run.kwargs(), inference_mode=False)
    module = EMALightningModule(
        num_datasets=data.num_datasets,
        model=model,
        loss={"_target_": "nequip.train.EnergyForceLoss", "per_atom_energy": True, "coeffs": errors},
        val_metrics={
            "_target_": "nequip.train.EnergyForceMetrics",
            "coeffs": {f"{name}_mae": weight for name, weight in errors.items()},
        },
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.01},
    )
    module.world_size = trainer.world_size
    trainer.fit(module, datamodule=data, ckpt_path=run.ckpt_path, **run.unpickling)
