from lightning.pytorch.cli import LightningCLI

from codec.data import GradientData
from codec.model import Codec

if __name__ == "__main__":
    LightningCLI(Codec, GradientData)
