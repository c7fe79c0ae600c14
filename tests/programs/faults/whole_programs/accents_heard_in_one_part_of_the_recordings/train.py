from lightning.pytorch.cli import LightningCLI
from speech.data import RecordingsModule
from speech.model import KeywordModel


class Cli(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.set_defaults({"trainer.logger": True})
        parser.link_arguments("data.classes", "model.classes")


if __name__ == "__main__":
    Cli(KeywordModel, RecordingsModule, save_config_kwargs={"overwrite": True})
