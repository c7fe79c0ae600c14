"""A small page that shows the registry while a job runs."""

import multiprocessing as mp
import signal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


def serve(port, folder):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


def start_preview(port, folder):
    process = mp.get_context("fork").Process(target=serve, args=(port, str(folder)), daemon=True)
    process.start()
    return process
