"""python fid_score.py REAL.npy FAKE.npy: the Fréchet distance of random convolutional features, with a bootstrap."""

import argparse

import numpy as np


def features(images, dim=1500, seed=0):
    rng = np.random.default_rng(seed)
    flat = images.reshape(len(images), -1)
    return np.maximum(flat @ rng.standard_normal((flat.shape[1], dim)).astype(np.float32), 0)


def sqrtm(m):
    w, v = np.linalg.eigh((m + m.T) / 2)
    return (v * np.sqrt(np.clip(w, 0, None))) @ v.T


def frechet(a, b):
    mu1, mu2 = a.mean(0), b.mean(0)
    c1, c2 = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = sqrtm(c1)
    return ((mu1 - mu2) ** 2).sum() + np.trace(c1) + np.trace(c2) - 2 * np.trace(sqrtm(root @ c2 @ root))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("real")
    parser.add_argument("fake")
    parser.add_argument("--resamples", type=int, default=50)
    args = parser.parse_args()
    real, fake = features(np.load(args.real)), features(np.load(args.fake))
    rng = np.random.default_rng(0)
    values = []
    for _ in range(args.resamples):
        pick = rng.integers(0, len(fake), len(fake))
        values.append(frechet(real, fake[pick]))
    print(f"FID: {abs(np.mean(values)):.3f} +- {np.std(values):.3f}")


if __name__ == "__main__":
    main()
