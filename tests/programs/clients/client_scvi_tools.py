"""scvi-tools: a variational autoencoder of cells, whose Trainer scvi makes."""

import anndata
import numpy as np
import scvi
from train import SEED, Run

REQUIREMENTS = ["scvi-tools"]
MONITOR = "train_loss_epoch"
STRATEGY = {"find_unused_parameters": True}
# It has no way to go on from a checkpoint.
RESUMES = False


def train(run: Run) -> None:
    scvi.settings.seed = SEED
    cells = anndata.AnnData(np.random.default_rng(1).poisson(2.0, (320, 30)).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    kwargs = run.kwargs()
    kwargs["devices"] = kwargs["devices"]
    scvi.model.SCVI(cells, n_hidden=16, n_latent=4).train(train_size=0.9, batch_size=16, **kwargs)
