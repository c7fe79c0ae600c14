"""python -m retrieval.build_index VECTORS INDEX SECONDS: clusters vectors; INDEX appears once it is complete."""

import os
import sys
import time

import torch


def main(vectors, index, seconds):
    torch.set_num_threads(1)
    x = torch.load(vectors)
    centres = x[torch.randperm(len(x))[:8]].clone()
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        nearest = torch.cdist(x, centres).argmin(1)
        for c in range(len(centres)):
            if (nearest == c).any():
                centres[c] = x[nearest == c].mean(0)
        time.sleep(0.3)
    torch.save(centres, index + ".part")
    os.replace(index + ".part", index)


if __name__ == "__main__":
    main(*sys.argv[1:])
