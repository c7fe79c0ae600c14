from landcover.data import Scenes
from landcover.model import LandCover
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(LandCover, Scenes, save_config_kwargs={"overwrite": True})
