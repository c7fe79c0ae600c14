"""Command lines from defaults, without a dependency."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace


def parse(**defaults) -> Namespace:
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=" ")
    return parser.parse_args()
