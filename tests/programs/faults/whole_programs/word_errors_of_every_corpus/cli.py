from asr.data import Corpora
from asr.model import Recognizer
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(Recognizer, Corpora, save_config_callback=None)
