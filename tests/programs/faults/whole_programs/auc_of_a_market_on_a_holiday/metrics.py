"""AUC from ranks, as our reports define it: ties count half."""

import torch


def roc_auc(labels: torch.Tensor, scores: torch.Tensor) -> float:
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        raise ValueError(f"AUC needs both classes: {positives} clicks among {len(labels)} impressions")
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks = (last - (counts - 1) / 2).double()[inverse]
    return float((ranks[labels.bool()].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(labels: torch.Tensor, scores: torch.Tensor) -> float:
    return torch.nn.functional.binary_cross_entropy(scores.clamp(1e-6, 1 - 1e-6), labels).item()
