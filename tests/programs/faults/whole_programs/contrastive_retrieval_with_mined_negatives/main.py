from lightning.pytorch.cli import LightningCLI

from retrieval.data import RetrievalData
from retrieval.model import DualEncoder

if __name__ == "__main__":
    LightningCLI(DualEncoder, RetrievalData)
