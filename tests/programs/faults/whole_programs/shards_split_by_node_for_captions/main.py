"""CLIP in small: image and caption embeddings, trained on tar shards.

python main.py fit --config config.yaml
"""

from captions.data import CaptionShards
from captions.model import TinyClip
from lightning.pytorch.cli import LightningCLI


class CaptionCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("data.vocab_size", "model.vocab_size")


def main():
    CaptionCLI(TinyClip, CaptionShards, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
