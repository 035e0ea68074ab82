"""One instance of an application with APScheduler."""

import asyncio
import json
import logging
import os
from datetime import datetime, timezone

import asyncpg
from apscheduler import AsyncScheduler, CoalescePolicy, ConflictPolicy, current_job
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore
from apscheduler.eventbrokers.asyncpg import AsyncpgEventBroker
from apscheduler.triggers.cron import CronTrigger
from sqlalchemy.ext.asyncio import create_async_engine

URL = os.environ["DATABASE_URL"]
LEASE = int(os.environ["CHAOS_LEASE"])


async def work(name):
    connection = await asyncpg.connect(URL)
    try:
        run = await connection.fetchval(
            "INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id",
            name, current_job.get().scheduled_fire_time, os.environ["CHAOS_INSTANCE"])
        await asyncio.sleep(int(os.environ["CHAOS_WORK_MS"]) / 1000)
        await connection.execute(
            "UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1", run)
    finally:
        await connection.close()


async def second():
    await work("second")


async def five():
    await work("five")


async def main():
    engine = create_async_engine(URL.replace("postgres://", "postgresql+asyncpg://"))
    scheduler = AsyncScheduler(
        SQLAlchemyDataStore(engine), AsyncpgEventBroker.from_async_sqla_engine(engine),
        identity=os.environ["CHAOS_PLACE"], lease_duration=LEASE, cleanup_interval=LEASE)
    # Ticks keep the fraction of a second that the start has.
    begin = datetime.now(timezone.utc).replace(microsecond=0)
    async with scheduler:
        for job in json.loads(os.environ["CHAOS_JOBS"]):
            await scheduler.add_schedule(
                globals()[job["name"]],
                CronTrigger(second=f"*/{job['every']}", timezone="UTC", start_time=begin),
                id=job["name"], coalesce=CoalescePolicy.all,
                conflict_policy=ConflictPolicy.do_nothing)
        await scheduler.run_until_stopped()  # handles SIGTERM


logging.basicConfig(level=logging.WARNING)
asyncio.run(main())
