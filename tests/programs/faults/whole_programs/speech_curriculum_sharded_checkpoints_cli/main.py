from lightning.pytorch.cli import LightningCLI

from speechkit.data import SpeechData
from speechkit.model import SpeechClassifier

if __name__ == "__main__":
    LightningCLI(SpeechClassifier, SpeechData)
