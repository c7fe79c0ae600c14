"""python dashboard.py PORT: keeps what runs post in SQLite, and exports a run now and then."""

import json
import sqlite3
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DB = "dashboard.sqlite"
EXPORT_EVERY = 90


def connect():
    db = sqlite3.connect(DB, timeout=900)
    db.execute("create table if not exists rows (path text, body text)")
    return db


def export():
    db = connect()
    db.isolation_level = None
    db.execute("begin exclusive")
    rows = db.execute("select path, body from rows order by rowid").fetchall()
    with Path("export.jsonl").open("w") as f:
        for path, body in rows:
            f.write(json.dumps([path, json.loads(body)]) + "\n")
            f.flush()
            time.sleep(2)  # the archive takes no more than this
    db.execute("commit")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        db = connect()
        with db:
            db.execute("insert into rows values (?, ?)", (self.path, body))
        n = db.execute("select count(*) from rows").fetchone()[0]
        if n % EXPORT_EVERY == 0:
            threading.Thread(target=export, daemon=True).start()
        answer = json.dumps({"rows": n}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
