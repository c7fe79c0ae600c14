import http.client
import io
import logging
from typing import Any
from urllib.parse import urlsplit

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

log = logging.getLogger(__name__)
CHUNK = 1 << 16


class StoreCheckpointIO(TorchCheckpointIO):
    """Saves checkpoints in an object store, under the path that Lightning gives them."""

    def __init__(self, url: str, prefix: str) -> None:
        self.host, self.prefix = urlsplit(url).netloc, prefix

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        key = f"/{self.prefix}/{str(path).split('checkpoints/')[-1]}"
        log.info("%s: %d bytes", key, buffer.tell())
        self.upload(key, buffer)

    def upload(self, key: str, buffer: io.BytesIO) -> None:
        connection = http.client.HTTPConnection(self.host)
        connection.putrequest("PUT", key)
        connection.putheader("Content-Length", str(buffer.getbuffer().nbytes))
        connection.endheaders()
        buffer.seek(0)
        while data := buffer.read(CHUNK):
            connection.send(data)  # <- here
        response = connection.getresponse()
        response.read()
        if response.status != 201:
            raise OSError(f"{key}: the store answers {response.status}")
        connection.close()
