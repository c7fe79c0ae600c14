"""Pretraining of a small decoder on packed token shards."""

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lm.data import PackedTokens, global_rank, load_manifest, write_corpus
from lm.model import Decoder


class PretrainCLI(LightningCLI):
    """Adds --epochs: the passes over the data, which has no length, become optimizer steps."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--epochs", type=int, default=1)
        parser.link_arguments("data.vocab_size", "model.vocab_size")
        parser.link_arguments("data.seq_len", "model.seq_len")

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        root = write_corpus(config.data.root, config.data.vocab_size)
        tokens = sum(entry["tokens"] for entry in load_manifest(root, global_rank()))
        per_step = config.data.batch_size * (config.data.seq_len + 1)
        config.trainer.max_steps = config.epochs * (tokens // per_step)  # <- here


def main():
    PretrainCLI(Decoder, PackedTokens, save_config_callback=None, parser_kwargs={"fit": {"parser_mode": "yaml"}})


if __name__ == "__main__":
    main()
