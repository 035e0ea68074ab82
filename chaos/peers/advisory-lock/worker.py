"""A worker that adds to a counter under an advisory lock of PostgreSQL."""

import json
import os
import sys
import time

import psycopg


def tell(event, **more):
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


def hold(session):
    sent = False
    try:
        n, = session.execute("SELECT n FROM chaos_counter").fetchone()
        time.sleep(0.05)
        tell("checked")  # there is nothing to ask
        time.sleep(0.05)
        sent = True
        session.execute("UPDATE chaos_counter SET n = %s", (n + 1,))
        tell("done", value=n + 1)
    except psycopg.Error:
        tell("unknown" if sent else "refused")
        raise


def main():
    asked, session = False, None
    while True:
        if not asked:
            tell("ask")
            asked = True
        try:
            session = session or psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
            session.execute("SELECT pg_advisory_lock(1)")
            tell("got")
            asked = False
            hold(session)
            session.execute("SELECT pg_advisory_unlock(1)")
        except psycopg.Error as error:
            print(error, file=sys.stderr)
            session = None
            time.sleep(0.1)


main()
