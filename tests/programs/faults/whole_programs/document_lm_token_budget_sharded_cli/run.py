from lightning.pytorch.cli import LightningCLI

from doclm.data import Documents
from doclm.model import DocumentLM

if __name__ == "__main__":
    LightningCLI(DocumentLM, Documents)
