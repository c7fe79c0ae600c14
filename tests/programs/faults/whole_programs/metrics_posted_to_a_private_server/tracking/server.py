"""python server.py DATABASE: prints its address, then serves. One request at a time, so that sqlite has one writer."""

import json
import os
import sqlite3
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

BACKUP_EVERY = 60  # requests
BACKUP_PAUSE_S = 5.0  # between two pages, so that the shared disk stays responsive

store = sqlite3.connect(sys.argv[1])
store.execute("create table if not exists points (run text, step int, key text, value real)")
counter = 0


def backup() -> None:
    with sqlite3.connect(sys.argv[1] + ".bak") as target:
        store.backup(target, pages=1, sleep=BACKUP_PAUSE_S, progress=lambda *_: time.sleep(BACKUP_PAUSE_S))


def leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        global counter
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        counter += 1
        if counter % BACKUP_EVERY == 0:
            backup()
        for key, value in body.get("metrics", {}).items():
            store.execute("insert into points values (?, ?, ?, ?)", (self.path, body["step"], key, value))
        store.commit()
        answer = b'{"ok": true}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


# some history of earlier runs
store.executemany(
    "insert into points values ('/runs/old', ?, 'train/loss', ?)", ((i, 1 / (1 + i)) for i in range(20000))
)
store.commit()
threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
httpd = HTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{httpd.server_port}", flush=True)
httpd.serve_forever()
