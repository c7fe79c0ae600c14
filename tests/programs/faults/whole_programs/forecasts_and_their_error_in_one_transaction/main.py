"""Forecasts the next day's load of electricity meters."""

from lightning.pytorch.cli import LightningCLI
from load import Forecaster, Meters


def main():
    LightningCLI(Forecaster, Meters, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
