from captioner.data import Captions
from captioner.model import Captioner
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    cli = LightningCLI(Captioner, Captions, save_config_kwargs={"overwrite": True})
