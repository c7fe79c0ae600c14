import logging
import time
from pathlib import Path

from corpus import pack
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger("curriculum")


class LongerSentences(Callback):
    """Starts with short sentences and admits longer ones in later epochs."""

    def __init__(self, path: Path, sentences: int, words=(5, 6, 7)):
        self.path = path
        self.sentences = sentences
        self.words = words

    def words_in(self, epoch):
        return self.words[min(epoch, len(self.words) - 1)]

    @rank_zero_only
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            return  # made by prepare_data
        began = time.perf_counter()
        words = self.words_in(trainer.current_epoch)
        total = pack(self.path, self.sentences, words, seed=trainer.current_epoch)
        log.info(
            "epoch %d: %d tokens, %d words, %.1f s", trainer.current_epoch, total, words, time.perf_counter() - began
        )
