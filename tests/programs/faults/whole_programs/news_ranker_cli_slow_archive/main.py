from lightning.pytorch.cli import LightningCLI

from ranker.data import NewsData
from ranker.model import Ranker

if __name__ == "__main__":
    LightningCLI(Ranker, NewsData, save_config_kwargs={"overwrite": True})
