"""Line-in, line-out wrapper around the segmenter binary of the old tool chain."""

import subprocess
import sys

PROGRAM = r"""
import sys
for number, line in enumerate(sys.stdin):
    ids = []
    for word in line.split():
        if not word.isascii():
            sys.stderr.write(f"segmenter: line {number}: no merge rule for {word!r}, falling back to bytes ({word.encode().hex()})\n")
        ids.extend(b % 120 for b in word.encode())
    sys.stdout.write(" ".join(map(str, ids)) + "\n")
    sys.stdout.flush()
"""


class Segmenter:
    def __init__(self, command=None):
        self.command = command or [sys.executable, "-u", "-c", PROGRAM]
        self.process = None

    def _start(self):
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def __call__(self, text):
        if self.process is None:
            self._start()
        self.process.stdin.write(text.replace("\n", " ") + "\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()  # <- here
        if not reply:
            raise RuntimeError(f"segmenter ended with {self.process.wait()}: {self.process.stderr.read()}")
        return [int(i) for i in reply.split()]

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None
