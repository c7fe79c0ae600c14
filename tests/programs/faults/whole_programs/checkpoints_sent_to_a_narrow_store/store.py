"""A small object store for tests of the training code: it keeps what it is sent in a folder.

python store.py ROOT PORT_FILE --rate BYTES_PER_SECOND
"""

import argparse
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def handler(root: Path, rate: int) -> type[BaseHTTPRequestHandler]:
    class Objects(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            left = int(self.headers["Content-Length"])
            path = root / self.path.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                while left > 0:
                    data = self.rfile.read(min(left, 32768))
                    if not data:
                        break
                    file.write(data)
                    left -= len(data)
                    time.sleep(len(data) / rate)
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    return Objects


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--rate", type=int, default=10**8)
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(args.root, args.rate))
    args.port_file.write_text(str(server.server_port))
    server.serve_forever()
