"""One instance of an application with DBOS. `prepare` makes its tables."""

import json
import os
import signal
import sys
import threading
import time
from datetime import datetime
from typing import Any

import psycopg
from dbos import DBOS

URL = os.environ["DATABASE_URL"].replace("postgres://", "postgresql://")
JOBS = json.loads(os.environ["CHAOS_JOBS"])
DBOS(config={
    "name": "chaos", "application_version": "1", "system_database_url": URL,
    "executor_id": os.environ.get("CHAOS_PLACE", "prepare"), "log_level": "WARNING"})


@DBOS.step(retries_allowed=True, max_attempts=10, interval_seconds=1)
def work(name, slot):
    with psycopg.connect(URL, autocommit=True) as connection:
        run, = connection.execute(
            "INSERT INTO chaos_run (job, slot, instance) VALUES (%s, %s, %s) RETURNING id",
            (name, slot, os.environ["CHAOS_INSTANCE"])).fetchone()
        time.sleep(int(os.environ["CHAOS_WORK_MS"]) / 1000)
        connection.execute(
            "UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = %s", (run,))


@DBOS.workflow()
def job(scheduled_time: datetime, context: Any):
    work(context, scheduled_time)


DBOS.launch()
if sys.argv[1:] != ["prepare"]:
    for told in JOBS:
        DBOS.register_queue(told["name"], concurrency=1)
    DBOS.apply_schedules([
        {"schedule_name": told["name"], "workflow_fn": job, "context": told["name"],
         "schedule": f"*/{told['every']} * * * * *", "automatic_backfill": True,
         "queue_name": told["name"]} for told in JOBS])
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    over.wait()
DBOS.destroy(workflow_completion_timeout_sec=5)
