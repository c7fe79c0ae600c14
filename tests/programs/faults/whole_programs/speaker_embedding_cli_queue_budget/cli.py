from lightning.pytorch.cli import LightningCLI

from speakers.data import SpeakerData
from speakers.model import SpeakerNet

if __name__ == "__main__":
    LightningCLI(SpeakerNet, SpeakerData, save_config_kwargs={"overwrite": True})
