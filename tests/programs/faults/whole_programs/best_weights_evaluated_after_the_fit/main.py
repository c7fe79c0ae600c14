import argparse

from detector.api import Detector, TrainConfig


def main():
    parser = argparse.ArgumentParser(description="Trains a one-box detector on drawn images")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--run-test", action="store_true")
    args = parser.parse_args()
    results = Detector().train(TrainConfig(**vars(args)))
    print(results)


if __name__ == "__main__":
    main()
