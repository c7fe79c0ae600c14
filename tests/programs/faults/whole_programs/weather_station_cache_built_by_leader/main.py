from lightning.pytorch.cli import LightningCLI

from data import WeatherData
from model import Forecaster

if __name__ == "__main__":
    LightningCLI(Forecaster, WeatherData, seed_everything_default=31)
