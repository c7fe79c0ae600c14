import json
import urllib.request

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class DashboardLogger(Logger):
    """Sends hyperparameters and metrics as JSON."""

    def __init__(self, url, run):
        super().__init__()
        self.url, self.run = url, run

    @property
    def name(self):
        return "dashboard"

    @property
    def version(self):
        return self.run

    def _post(self, path, payload):
        body = json.dumps(payload, default=str).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:  # <- here
            return json.loads(response.read())

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self._post(f"runs/{self.run}/params", dict(params))

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self._post(f"runs/{self.run}/metrics", {"step": step, **metrics})

    @rank_zero_only
    def finalize(self, status):
        self._post(f"runs/{self.run}/status", {"status": status})
