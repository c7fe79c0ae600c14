"""Reads tab-separated hypotheses and references, prints one line per sentence and the mean."""

import sys


def ngrams(text, n):
    return {text[i : i + n] for i in range(len(text) - n + 1)}


def chrf(hyp, ref):
    scores = []
    for n in (1, 2, 3):
        h, r = ngrams(hyp, n), ngrams(ref, n)
        both = len(h & r)
        scores.append(2 * both / (len(h) + len(r) or 1))
    return sum(scores) / len(scores)


total = count = 0
for line in open(sys.argv[1]):
    hyp, ref = line.rstrip("\n").split("\t")
    score = chrf(hyp, ref)
    total, count = total + score, count + 1
    print(f"{count}\t{score:.4f}\t{hyp[:60]}\t{ref[:60]}")
print(f"MEAN\t{total / max(count, 1):.4f}")
