import autoencoder  # noqa: F401 - registers the model and the data
import lightning as L
from lightning.pytorch.cli import LightningCLI

LightningCLI(
    L.LightningModule,
    L.LightningDataModule,
    subclass_mode_model=True,
    subclass_mode_data=True,
    seed_everything_default=1,
    save_config_kwargs={"overwrite": True},
)
