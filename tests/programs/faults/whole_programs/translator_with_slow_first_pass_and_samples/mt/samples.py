import threading
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class TranslateSamples(Callback):
    """The main process translates a few sentences after each epoch; a thread writes them to a file."""

    def __init__(self, folder, sentences=6, length=14, seconds_per_token=0.07):
        self.folder, self.sentences, self.length, self.pace = Path(folder), sentences, length, seconds_per_token
        self.writer = None

    def on_train_epoch_end(self, trainer, module):
        if not trainer.is_global_zero:
            return
        sources = torch.stack([trainer.datamodule.data[i][0] for i in range(self.sentences)])
        texts = []
        for source in sources:
            texts.append(self.translate(module, source.unsqueeze(0)))
        if self.writer is not None:
            self.writer.join()
        self.writer = threading.Thread(target=self.write, args=(trainer.current_epoch, texts), name="samples")
        self.writer.start()

    @torch.no_grad()
    def translate(self, module, source):
        tokens = [1]
        for _ in range(self.length):
            scores = module.model(source, torch.tensor([tokens]))[0, -1]
            tokens.append(int(scores.argmax()))
            time.sleep(self.pace)
        return tokens[1:]

    def write(self, epoch, texts):
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"epoch{epoch}.txt", "w") as file:
            for text in texts:
                file.write(" ".join(map(str, text)) + "\n")
                file.flush()
                time.sleep(0.3)

    def on_fit_end(self, trainer, module):
        if self.writer is not None:
            self.writer.join()
