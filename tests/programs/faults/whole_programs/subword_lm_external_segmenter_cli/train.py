from lightning.pytorch.cli import LightningCLI

from lmkit.data import TextData
from lmkit.model import GruLM

if __name__ == "__main__":
    LightningCLI(GruLM, TextData, seed_everything_default=7)
