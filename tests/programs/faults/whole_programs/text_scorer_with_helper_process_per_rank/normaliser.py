"""Normalises text in a process of its own: the rules need a lot of memory once, not once per loader."""

import multiprocessing as mp
import re
import unicodedata

UNITS = {"km": "kilometres", "kg": "kilograms", "min": "minutes", "h": "hours"}
NUMBER = re.compile(r"(\S+)(km|kg|min|h)\b")


def spell(match):
    value = float(match.group(1).replace(",", "."))
    return f"{value:g} {UNITS[match.group(2)]}"


def serve(requests, answers):
    while True:
        item = requests.get()
        if item is None:
            return
        ticket, texts = item
        clean = [unicodedata.normalize("NFKC", text).lower() for text in texts]
        answers.put((ticket, [NUMBER.sub(spell, text) for text in clean]))


class Normaliser:
    def __init__(self):
        context = mp.get_context("spawn")
        self.requests, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=serve, args=(self.requests, self.answers), daemon=True)
        self.process.start()
        self.ticket = 0

    def __call__(self, texts):
        self.ticket += 1
        self.requests.put((self.ticket, texts))
        ticket, clean = self.answers.get()  # <- here
        assert ticket == self.ticket
        return clean

    def close(self):
        self.requests.put(None)
        self.process.join(5)
