"""A score of captions after METEOR: the alignment with the fewest chunks counts."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product

MOST = 50_000


def alignments(words: Sequence[str], reference: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    places = [[i for i, other in enumerate(reference) if other == word] or [None] for word in words]
    for chosen in islice(product(*places), MOST):
        matched = [(i, j) for i, j in enumerate(chosen) if j is not None]
        if len({j for _, j in matched}) == len(matched):
            yield matched


def chunks(matched: list[tuple[int, int]]) -> int:
    follows = sum(b[0] == a[0] + 1 and b[1] == a[1] + 1 for a, b in pairwise(matched))
    return len(matched) - follows


def sentence_score(words: Sequence[str], reference: Sequence[str]) -> float:
    best: tuple[int, int] = (0, 0)
    for matched in alignments(words, reference):
        best = max(best, (len(matched), -chunks(matched)))
    found, pieces = best[0], -best[1]
    if not found:
        return 0.0
    precision, recall = found / len(words), found / len(reference)
    mean = 10 * precision * recall / (recall + 9 * precision)
    return mean * (1 - 0.5 * (pieces / found) ** 3)


def corpus_score(captions: list[str], references: list[str]) -> float:
    pairs = zip(captions, references, strict=True)
    return sum(sentence_score(c.split(), r.split()) for c, r in pairs) / max(1, len(captions))
