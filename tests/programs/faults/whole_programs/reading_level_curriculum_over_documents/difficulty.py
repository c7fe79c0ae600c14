"""Reading level of documents, in worker processes with a CPU budget."""

import multiprocessing as mp
import resource


def limit_cpu(seconds):
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def repetition(tokens, window):
    repeats = 0
    for i, token in enumerate(tokens):
        repeats += tokens[max(0, i - window) : i].count(token)
    return repeats / max(1, len(tokens))


def reading_level(tokens):
    types = len(set(tokens))
    return types / max(1, len(tokens)) ** 0.5 - 0.01 * repetition(tokens, window=len(tokens) // 2)


def score_documents(documents, processes=2, cpu_seconds=5):
    pool = mp.Pool(processes, initializer=limit_cpu, initargs=(cpu_seconds,))
    levels = pool.map(reading_level, [d["tokens"] for d in documents], chunksize=16)  # <- here
    pool.close()
    pool.join()
    return levels
