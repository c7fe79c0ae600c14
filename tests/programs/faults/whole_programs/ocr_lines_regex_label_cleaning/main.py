import torch
from lightning.pytorch.cli import LightningCLI

from ocr.data import Boxes
from ocr.model import LineReader

if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(LineReader, Boxes, seed_everything_default=5, save_config_kwargs={"overwrite": True})
