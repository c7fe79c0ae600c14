"""torch-uncertainty: a regression with a normal distribution as its answer; its Trainer has a test loop of its own."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty import TUTrainer
from torch_uncertainty.losses import DistributionNLLLoss
from torch_uncertainty.models.mlp import mlp
from torch_uncertainty.routines import RegressionRoutine
from train import Run

REQUIREMENTS = ["torch-uncertainty", "scikit-learn", "timm"]
MONITOR = "train_loss"


def train(run: Run) -> None:
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.rand(160, 4, generator=numbers)
    data = TensorDataset(inputs, inputs.sum(1))
    model = mlp(in_features=4, num_outputs=1, hidden_dims=[16], dropout_rate=0.1, dist_family="normal")
    routine = RegressionRoutine(
        model,
        output_dim=1,
        loss=DistributionNLLLoss(),
        dist_family="normal",
        optim_recipe=torch.optim.Adam(model.parameters(), lr=0.01),
    )
    trainer = TUTrainer(**run.kwargs())
    loaders = [DataLoader(data, batch_size=8, shuffle=shuffled) for shuffled in (True, False)]
    trainer.fit(routine, *loaders, ckpt_path=run.ckpt_path)
    trainer.test(routine, loaders[1], verbose=False)
