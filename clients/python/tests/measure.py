"""Measures the client on a database: measure.py URL. The table and the functions exist there.

With the URL of a Redis server, measure.py URL REDIS_URL, it compares the client with the lock of
redis-py (pip install redis): both in turn, seven rounds each, keys of their own for each thread.
"""

from __future__ import annotations

import importlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import rowlock

HELD = 0.5
ROUNDS = 7


def rate(cycles: int, threads: int, cycle: Callable[[int], object]) -> float:
    """Returns how many cycles a second all threads make together."""

    def work(number: int) -> None:
        for _ in range(cycles // threads):
            cycle(number)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return cycles / (time.perf_counter() - began)


def hold(url: str) -> None:
    """Holds a key for half a second each time that it is told to, and says when it is released."""
    locks = rowlock.connect(url, label="holder")
    for _ in sys.stdin:
        with locks.lock("hand-over"):
            print("held", flush=True)
            time.sleep(HELD)
            before = time.time()
        print(before, flush=True)


def handovers(url: str, locks: rowlock.Locks, times: int) -> list[float]:
    """Returns the seconds from the beginning of a release to a grant in another process."""
    command = [sys.executable, __file__, url, "hold"]
    pipe = subprocess.PIPE
    measured = []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        for _ in range(times):
            holder.stdin.write("again\n")
            holder.stdin.flush()
            holder.stdout.readline()
            with locks.lock("hand-over", wait=30):
                granted = time.time()
            measured.append(granted - float(holder.stdout.readline()))
        holder.stdin.close()
    return measured


def compare(url: str, redis_url: str) -> None:
    """Prints the median rates of both, and of the ratios of each round."""
    redis: Any = importlib.import_module("redis")
    locks, client = rowlock.connect(url, label="measure"), redis.Redis.from_url(redis_url)

    def ours(number: int) -> None:
        with locks.lock(f"measured {number}"):
            pass

    def theirs(number: int) -> None:
        with client.lock(f"measured {number}", timeout=30):
            pass

    for threads, cycles in ((1, 1000), (16, 4800)):
        for way in (ours, theirs):
            rate(10 * threads, threads, way)
        rounds = [
            tuple(rate(cycles, threads, way) for way in (ours, theirs)) for _ in range(ROUNDS)
        ]
        own, other = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        ratio = statistics.median(own / other for own, other in rounds)
        print(
            f"{threads:2} threads: rowlock {own:6.0f} a second, redis-py {other:6.0f}, {ratio:.2f}"
        )
    locks.close()


def main(url: str) -> None:
    locks = rowlock.connect(url, label="measure")

    def cycle(number: int) -> None:
        with locks.lock(f"measured {number}"):
            pass

    rate(50, 1, cycle)
    print(f"acquire and release, 1 thread:    {rate(500, 1, cycle):7.0f} a second")
    print(f"acquire and release, 16 threads:  {rate(3200, 16, cycle):7.0f} a second")
    with locks.lock("held"):
        refused = rate(500, 1, lambda _: locks.lock("held").try_acquire())
    print(f"a refused try:                    {1000 / refused:7.2f} ms")
    leases = [locks.lock(f"kept {number}").acquire() for number in range(20)]
    names = sorted({thread.name for thread in threading.enumerate()} - {"MainThread"})
    print(f"threads with 20 leases:           {len(names):7} ({', '.join(names)})")
    for lease in leases:
        assert lease
        lease.release()
    waits = [1000 * wait for wait in handovers(url, locks, 21)]
    print(f"hand-over between processes, p50: {statistics.median(waits):7.1f} ms")
    print(f"                         longest: {max(waits):7.1f} ms")
    locks.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case [url, "hold"]:
            hold(url)
        case [url, redis_url]:
            compare(url, redis_url)
        case [url]:
            main(url)
