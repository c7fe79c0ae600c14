from lightning.pytorch.cli import LightningCLI

from learner import SpiralNet
from spirals import SpiralData

if __name__ == "__main__":
    LightningCLI(SpiralNet, SpiralData, seed_everything_default=3)
