"""A worker that adds to a counter under a lock in Redis."""

import json
import os
import sys
import time

import redis
import redis_lock

LEASE = int(os.environ["CHAOS_LEASE"])


def tell(event, **more):
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


def make(client):
    """A lock and the question whether it still stands."""
    if sys.argv[1] == "redis-py":
        lock = client.lock("counter-lock", timeout=LEASE)
        return lock, lock.owned
    lock = redis_lock.Lock(client, "counter-lock", expire=LEASE, auto_renewal=True)
    return lock, lambda: lock.get_owner_id() == lock.id


def hold(client, stands):
    sent = False
    try:
        value = int(client.get("counter") or 0) + 1
        time.sleep(0.05)
        if not stands():
            return tell("refused")
        tell("checked")
        time.sleep(0.05)
        sent = True
        client.set("counter", value)
        tell("done", value=value)
    except redis.RedisError as error:
        print(error, file=sys.stderr)
        tell("unknown" if sent else "refused")


def main():
    client = redis.Redis.from_url(os.environ["REDIS_URL"])
    asked = False
    while True:
        if not asked:
            tell("ask")
            asked = True
        lock, stands = make(client)
        try:
            lock.acquire()
        except redis.RedisError as error:
            print(error, file=sys.stderr)
            time.sleep(0.1)
            continue
        tell("got")
        asked = False
        hold(client, stands)
        try:
            lock.release()
        except (redis.RedisError, redis_lock.NotAcquired) as error:
            print(error, file=sys.stderr)


main()
