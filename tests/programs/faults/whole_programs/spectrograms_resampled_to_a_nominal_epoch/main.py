from audio.classifier import Classifier
from audio.pipeline import SpectrogramShards
from lightning.pytorch.cli import LightningCLI


def main():
    LightningCLI(Classifier, SpectrogramShards, save_config_callback=None)


if __name__ == "__main__":
    main()
