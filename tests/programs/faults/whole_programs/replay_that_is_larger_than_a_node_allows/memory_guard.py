"""Ends processes of a job that use more memory than the node allows for each, as the cluster's prologue does.

python memory_guard.py JOB_PID --megabytes 900
"""

import argparse
import sys
import time

import psutil


def watch(job: psutil.Process, limit: int, every_s: float) -> None:
    while job.is_running() and job.status() != psutil.STATUS_ZOMBIE:
        for process in [job, *job.children(recursive=True)]:
            try:
                used = process.memory_info().rss
                if used > limit:
                    print(f"guard: {process.pid} uses {used >> 20} MB of {limit >> 20}", file=sys.stderr, flush=True)
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(every_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=int)
    parser.add_argument("--megabytes", type=int, default=900)
    parser.add_argument("--every", type=float, default=0.3)
    args = parser.parse_args()
    try:
        watch(psutil.Process(args.job), args.megabytes << 20, args.every)
    except psutil.NoSuchProcess:
        pass
