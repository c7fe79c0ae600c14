from lightning.pytorch.cli import LightningCLI

from fusion.data import PostData
from fusion.task import PostClassifier


def main():
    LightningCLI(PostClassifier, PostData)


if __name__ == "__main__":
    main()
