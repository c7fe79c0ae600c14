"""Process groups of the ranks that have a modality, for statistics of its embeddings."""

import torch.distributed as dist

from mm.sources import CORPORA


class ModalityGroups:
    def __init__(self, assignment):
        self.assignment = assignment
        self.groups = {}

    def ranks_with(self, modality):
        return [r for r, corpus in enumerate(self.assignment) if modality in CORPORA[corpus]]

    def build(self):
        modalities = set().union(*(CORPORA[c] for c in self.assignment))
        for modality in modalities:
            self.groups[modality] = dist.new_group(self.ranks_with(modality))  # <- here

    def mean(self, modality, value):
        members = self.ranks_with(modality)
        if len(members) > 1:
            dist.all_reduce(value, group=self.groups[modality])
        return value / len(members)
