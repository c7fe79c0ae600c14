from lightning.pytorch.cli import LightningCLI

from budgeted.data import Corpus
from budgeted.segmenter import Segmenter


def main():
    LightningCLI(Segmenter, Corpus, seed_everything_default=42, save_config_callback=None)


if __name__ == "__main__":
    main()
