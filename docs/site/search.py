"""Whether the site's own search leads from what people paste to the right page: ``python docs/site/search.py SITE``.

It runs the search that the browser would run: the site's worker, on the site's index. Each query is from a public
thread; the right page has to come first.
"""

import json
import sys
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

# Thread, a quotation from it, and the page that has to come first.
QUERIES = (
    (
        "mlfoundations/open_clip#1024",
        "[rank7]:[E126 01:17:58.183000000 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation"
        " timeout: WorkNCCL(SeqNum=14217, OpType=ALLGATHER, NumelIn=65536, NumelOut=524288, Timeout(ms)=600000) ran for"
        " 600002 milliseconds before timing out.",
        "hangs/watchdog-timeout/",
    ),
    (
        "RUCAIBox/RecBole#2069",
        "torch.distributed.DistBackendError: [5] is setting up NCCL communicator and retrieving ncclUniqueId from [0]"
        " via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
        "hangs/socket-timeout/",
    ),
    (
        "QwenAudio/CosyVoice#180",
        "[E ProcessGroupGloo.cpp:138] [Rank 0]: Rank 2 failed to pass monitoredBarrier in 30000 ms",
        "hangs/monitored-barrier/",
    ),
    (
        "om-ai-lab/VLM-R1#257",
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued"
        " collectives.",
        "hangs/watchdog-stuck/",
    ),
    (
        "hpcaitech/ColossalAI#3514",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 1004) of binary:"
        " /usr/bin/python",
        "hangs/process-killed/",
    ),
    (
        "tatsu-lab/stanford_alpaca#207",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3 ncclRemoteError: A call"
        " failed possibly due to a network error or a remote process exiting prematurely.",
        "hangs/network-error/",
    ),
    (
        "modelscope/ms-swift#9443",
        "Detected mismatch between collectives on ranks",
        "hangs/mismatch-between-collectives/",
    ),
    (
        "Lightning-AI/pytorch-lightning#4420",
        "Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1",
        "hangs/socket-timeout/",
    ),
    (
        "lyu-yx/ACUMEN#4",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
        "hangs/process-killed/",
    ),
    (
        "Lightning-AI/pytorch-lightning#19487",
        "[E ProcessGroupNCCL.cpp:458] [Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64090,"
        " OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800741 milliseconds before timing out.",
        "hangs/watchdog-timeout/",
    ),
    (
        "hkchengrex/STCN#132",
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit.",
        "hangs/dataloader-worker-killed/",
    ),
    (
        "sgl-project/sglang#3226",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "hangs/cannot-connect/",
    ),
    (
        "zai-org/GLM-130B#31",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "hangs/process-killed/",
    ),
    (
        "vllm-project/vllm-ascend#1767",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        " [127.0.0.1]:33817",
        "hangs/connection-closed-by-peer/",
    ),
)
PASTED = Path(__file__).resolve().parents[1] / "assets" / "search.js"
# What a browser has and the worker asks for.
BROWSER = """
var self = globalThis, answers = [], listener;
globalThis.addEventListener = (_, given) => { listener = given };
globalThis.postMessage = answer => { answers.push(answer) };
globalThis.document = { addEventListener: () => {} };
globalThis.console = { warn: () => {} , log: () => {} };
"""


class Search:
    """The search of a built site."""

    def __init__(self, site: Path) -> None:
        [worker] = site.glob("assets/javascripts/workers/search.*.min.js")
        index = json.loads((site / "search" / "search_index.json").read_text())
        self._engine = MiniRacer()
        self._engine.eval(BROWSER)
        self._engine.eval(worker.read_text())
        self._engine.eval(PASTED.read_text())
        # As the site's own script sets it up.
        fields = {"title": {"boost": 1e3}, "text": {"boost": 1}, "tags": {"boost": 1e6}}
        config = index["config"] | {"fields": index["config"].get("fields") or fields}
        config["pipeline"] = [one for one in config.get("pipeline") or ["stopWordFilter"] if one]
        self._send({"type": 0, "data": {"config": config, "docs": index["docs"], "options": {"suggest": False}}})

    def _send(self, message: dict[str, Any]) -> Any:
        self._engine.eval(f"answers.length = 0; void listener({{ data: {json.dumps(message)} }})")
        return json.loads(str(self._engine.eval("JSON.stringify(answers)")))

    def close(self) -> None:
        """Ends its engine, whose threads would go on."""
        self._engine.close()

    def pages(self, query: str) -> list[str]:
        """Addresses of the pages found, the first one first."""
        self._engine.eval(f"var words = plainWords({json.dumps(query)})")
        [answer] = self._send({"type": 2, "data": self._engine.eval("words")})
        return [found[0]["location"].partition("#")[0] for found in answer["data"]["items"]]


def main() -> None:
    """Prints each text that leads elsewhere; the exit code is 1 if there are any."""
    search, wrong = Search(Path(sys.argv[1])), 0
    for thread, query, page in QUERIES:
        found = search.pages(query)
        if found[:1] != [page]:
            wrong += 1
            print(f"{thread}: the search finds {', '.join(found[:3]) or 'nothing'} and not {page} for: {query}")
    search.close()
    print(f"{len(QUERIES) - wrong} of {len(QUERIES)} texts of public threads lead to their page at once.")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
