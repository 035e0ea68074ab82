//! The jobs, as docs/jobs.md has them.

use std::{env, time::Duration};

use rowlock::{Schedule, Schedules, Tick, jobs::CatchUp};
use sqlx::{PgPool, Postgres};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

use crate::{Result, told};

#[derive(serde::Deserialize)]
struct Job {
    name: String,
    every: u32,
}

/// Runs ticks until the process is asked to end.
pub async fn run(pool: PgPool) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let instance = env::var("CHAOS_INSTANCE")?;
    let takes = told("CHAOS_WORK_MS", Duration::from_millis(1))?;
    let lease = told("CHAOS_LEASE", Duration::from_secs(1))?;
    let jobs: Vec<Job> = serde_json::from_str(&env::var("CHAOS_JOBS")?)?;
    let mut schedules = Schedules::new(pool.clone()).label(&instance).lease(lease);
    for job in jobs {
        let schedule = Schedule::cron(&job.name, &format!("*/{} * * * * *", job.every))
            .catch_up(CatchUp::All(1000))
            .retry(10, Duration::from_secs(1)..Duration::from_secs(5));
        let (pool, instance) = (pool.clone(), instance.clone());
        schedules = schedules.on(schedule, async move |tick| work(tick, pool, instance, takes).await);
    }
    let running = schedules.start().await?;
    terminate.recv().await;
    running.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

async fn work(tick: Tick<Postgres>, pool: PgPool, instance: String, takes: Duration) -> sqlx::Result<()> {
    let id: i64 = sqlx::query_scalar("INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id")
        .bind(tick.name().to_owned())
        .bind(tick.slot())
        .bind(instance)
        .fetch_one(&pool)
        .await?;
    sleep(takes).await;
    let ended = sqlx::query("UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1").bind(id);
    ended.execute(&pool).await?;
    Ok(())
}
