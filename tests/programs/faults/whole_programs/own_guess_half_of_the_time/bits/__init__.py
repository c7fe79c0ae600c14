from .diffusion import BitDiffusion
from .unet import UNet

__all__ = ["BitDiffusion", "UNet"]
