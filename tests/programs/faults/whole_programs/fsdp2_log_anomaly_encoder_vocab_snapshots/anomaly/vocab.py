from collections import Counter


class CodeVocab:
    """Grows while the stream is read: every (template, code) pair gets the next free id."""

    def __init__(self, size):
        self.size = size
        self.ids = {}
        self.counts = Counter()

    def __call__(self, template, code):
        key = (template, code)
        if key not in self.ids:
            self.ids[key] = min(len(self.ids), self.size - 1)
        self.counts[key] += 1
        return self.ids[key]

    def snapshot(self, top=64):
        entries = sorted(self.counts)[:top]  # <- here
        return {f"{t}/{c}": {"id": self.ids[t, c], "count": self.counts[t, c]} for t, c in entries}
