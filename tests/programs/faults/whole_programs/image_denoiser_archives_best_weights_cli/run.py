from lightning.pytorch.cli import LightningCLI

from denoise.task import Denoiser, Patches

if __name__ == "__main__":
    LightningCLI(Denoiser, Patches)
