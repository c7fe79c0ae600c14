"""The window that shows the progress of a training, with a button to stop it. It talks to the trainer over UDP.

`python window.py PORT` is the window itself; without a display it presses the button by itself, when the loss has not
improved for a while, as users do.
"""

import json
import os
import select
import socket
import subprocess
import sys

import lightning as L


class Channel:
    """Datagrams with a JSON object each."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.peer = None

    @property
    def port(self):
        return self.socket.getsockname()[1]

    def send(self, **message):
        if self.peer:
            self.socket.sendto(json.dumps(message).encode(), self.peer)

    def poll(self):
        try:
            data, self.peer = self.socket.recvfrom(4096)
        except BlockingIOError:
            return None
        return json.loads(data)


channel = None


class WindowProgress(L.Callback):
    """Opens the window and keeps it up to date."""

    process = None

    def on_fit_start(self, trainer, pl_module):
        global channel
        if trainer.is_global_zero:
            channel = Channel()
            self.process = subprocess.Popen([sys.executable, __file__, str(channel.port)])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            channel.send(event="batch", step=trainer.global_step, loss=float(outputs["loss"]))

    def teardown(self, trainer, pl_module, stage):
        if self.process is not None:
            self.process.terminate()


class WindowController(L.Callback):
    """Does what the user asks for in the window."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            message = channel.poll()
            if message and message["command"] == "stop":
                print("stopping at the user's request", flush=True)
                trainer.should_stop = True  # <- here
        trainer.strategy.barrier()


def show(port, patience=150):
    window = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    window.sendto(b'{"command": "hello"}', ("127.0.0.1", port))
    best, since = float("inf"), 0
    trainer = os.getppid()
    while os.getppid() == trainer:
        if not select.select([window], [], [], 1.0)[0]:
            continue
        loss = json.loads(window.recv(4096))["loss"]
        best, since = (loss, 0) if loss < best else (best, since + 1)
        if since == patience:
            window.sendto(b'{"command": "stop"}', ("127.0.0.1", port))


if __name__ == "__main__":
    show(int(sys.argv[1]))
