import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image, ImageDraw


def panel(picture: torch.Tensor, title: str, side: int) -> Image.Image:
    values = (picture.squeeze(0).clamp(0, 1) * 255).byte().tolist()
    image = Image.new("L", (side, side + 16), 255)
    pixel = side / len(values)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            draw.rectangle((x * pixel, y * pixel, (x + 1) * pixel, (y + 1) * pixel), fill=value)
    draw.text((4, side + 2), title, fill=0)
    return image


class Reconstructions(Callback):
    """Pictures of the validation beside what the model makes of them."""

    def __init__(self, pictures: int = 16, side: int = 128) -> None:
        self.pictures, self.side = pictures, side

    @rank_zero_only
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        (pictures,) = trainer.val_dataloaders.dataset[: self.pictures]
        with torch.no_grad():
            made = pl_module(pictures)
        writer = trainer.logger.experiment
        for number, (picture, other) in enumerate(zip(pictures, made, strict=True)):
            error = float((picture - other).square().sum())
            both = [panel(picture, "picture", self.side), panel(other, f"{error:.1f}", self.side)]
            sheet = torch.stack([torch.from_numpy(np.array(image)) for image in both])
            writer.add_image(f"reconstruction/{number}", sheet.flatten(0, 1)[None] / 255, trainer.current_epoch)
        writer.flush()
