from lightning.pytorch.cli import LightningCLI

from aae.data import SpectraData
from aae.system import AdversarialAutoEncoder

if __name__ == "__main__":
    LightningCLI(AdversarialAutoEncoder, SpectraData, seed_everything_default=17)
