from lightning.pytorch.cli import LightningCLI

from qa.data import PairData
from qa.model import AnswerScorer


def cli():
    LightningCLI(AnswerScorer, PairData, seed_everything_default=5, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    cli()
