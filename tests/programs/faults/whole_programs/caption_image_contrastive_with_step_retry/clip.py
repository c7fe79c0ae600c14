import logging

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F

from encoders import CaptionEncoder, ImageEncoder

log = logging.getLogger("clip")


class TinyClip(L.LightningModule):
    def __init__(self, dim=48, vocab=150, lr=1e-3, max_retries=2):
        super().__init__()
        self.save_hyperparameters()
        self.images = ImageEncoder(dim)
        self.captions = CaptionEncoder(vocab, dim)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def _contrast(self, images, captions):
        image = self.images(images)
        others = self.all_gather(image.detach()).flatten(0, 1)
        text = self.captions(captions)
        offset = self.global_rank * len(images)
        target = torch.arange(offset, offset + len(images))
        logits_text = self.log_scale.exp() * text @ others.T
        logits_image = self.log_scale.exp() * image @ text.T
        return 0.5 * (F.cross_entropy(logits_text, target) + F.cross_entropy(logits_image, target - offset))

    def training_step(self, batch, batch_idx):
        images, captions = batch
        for attempt in range(self.hparams.max_retries + 1):
            try:
                loss = self._contrast(images, captions)  # <- here
                break
            except ValueError as e:
                log.warning("step %d, attempt %d: %s", self.global_step, attempt, e)
                captions = [c if len(c) else [0] for c in captions]
        self.log("loss", loss, prog_bar=True, batch_size=len(images))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
