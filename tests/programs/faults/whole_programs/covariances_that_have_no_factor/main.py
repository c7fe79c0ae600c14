"""Whitened encoder for readings of pumps: finds unusual ones by their likelihood."""

import logging

from lightning.pytorch.cli import ArgsType, LightningCLI
from pumps import Readings
from whitening import WhitenedEncoder


def main(args: ArgsType = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    LightningCLI(WhitenedEncoder, Readings, args=args, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
