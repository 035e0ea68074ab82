"""One instance of an application with procrastinate. `prepare` makes its tables."""

import asyncio
import json
import logging
import os
import sys
from datetime import datetime, timezone

import procrastinate
import psycopg

URL = os.environ["DATABASE_URL"]
LEASE = int(os.environ["CHAOS_LEASE"])
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


async def work(name, timestamp):
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as connection:
        row = await connection.execute(
            "INSERT INTO chaos_run (job, slot, instance) VALUES (%s, %s, %s) RETURNING id",
            (name, datetime.fromtimestamp(timestamp, timezone.utc), os.environ["CHAOS_INSTANCE"]))
        run, = await row.fetchone()
        await asyncio.sleep(int(os.environ["CHAOS_WORK_MS"]) / 1000)
        await connection.execute(
            "UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = %s", (run,))


def declare(name, every):
    @app.periodic(cron=f"* * * * * */{every}")
    @app.task(name=name, lock=name, retry=procrastinate.RetryStrategy(max_attempts=10, wait=1))
    async def task(timestamp):
        await work(name, timestamp)


for job in json.loads(os.environ["CHAOS_JOBS"]):
    declare(job["name"], job["every"])


@app.periodic(cron="* * * * * */5")
@app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
async def retry_stalled_jobs(context, timestamp):
    stalled = await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=LEASE)
    for job in stalled:
        await app.job_manager.retry_job(job)


async def main():
    async with app.open_async():
        if sys.argv[1:] == ["prepare"]:
            await app.schema_manager.apply_schema_async()
        else:
            await app.run_worker_async(
                concurrency=10, update_heartbeat_interval=3, stalled_worker_timeout=LEASE,
                shutdown_graceful_timeout=5)  # handles SIGTERM


logging.basicConfig(level=logging.WARNING)
asyncio.run(main())
