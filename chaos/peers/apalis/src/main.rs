//! One instance of an application with apalis-cron and apalis-postgres. `prepare` makes its tables.

use std::{env, error::Error, str::FromStr, time::Duration};

use apalis::{layers::retry::RetryPolicy, prelude::*};
use apalis_cron::{CronScheduler, Tick};
use apalis_postgres::{Config, PgPool, PostgresStorage};
use chrono::{DateTime, Utc};
use futures_util::StreamExt;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

#[derive(serde::Deserialize)]
struct Job {
    name: String,
    every: u32,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let pool = PgPool::connect(&env::var("DATABASE_URL")?).await?;
    if env::args().nth(1).as_deref() == Some("prepare") {
        PostgresStorage::setup(&pool).await?;
        return Ok(());
    }
    let instance = env::var("CHAOS_INSTANCE")?;
    let jobs: Vec<Job> = serde_json::from_str(&env::var("CHAOS_JOBS")?)?;
    let mut workers = Vec::new();
    for Job { name, every } in jobs {
        // What is done is recorded in batches, too.
        let config = Config::default().queue(&name).batch_size(1);
        let config = config.heartbeat_interval(Duration::from_secs(5)).missed_heartbeats(2);
        let storage = PostgresStorage::<Tick>::new(&pool).with_config(config);
        tokio::spawn(store(name.clone(), every, storage.clone()));
        let worker = WorkerBuilder::new(format!("{name}-{instance}"))
            .backend(storage.with_pubsub().poll_with_strategy(Strategy::new().interval(Duration::from_millis(500))))
            .retry(RetryPolicy::retries(10))
            .data(pool.clone())
            .data(name)
            .build(work);
        workers.push(tokio::spawn(async move {
            let mut terminate = signal(SignalKind::terminate())?;
            worker
                .run_until(async move {
                    terminate.recv().await;
                    Ok::<_, std::io::Error>(())
                })
                .await?;
            Ok::<_, Box<dyn Error + Send + Sync>>(())
        }));
    }
    for worker in workers {
        worker.await??;
    }
    Ok(())
}

/// Stores each tick, once for all instances.
async fn store(name: String, every: u32, storage: PostgresStorage<Tick>) -> Result<(), BoxDynError> {
    let schedule = cron::Schedule::from_str(&format!("*/{every} * * * * *"))?;
    let mut ticks = Box::pin(CronScheduler::new(schedule).into_stream());
    while let Some(tick) = ticks.next().await {
        tokio::spawn(store_tick(name.clone(), tick?, storage.clone()));
    }
    Ok(())
}

async fn store_tick(name: String, tick: Tick, mut storage: PostgresStorage<Tick>) {
    let key = format!("{name} {}", tick.get_timestamp());
    while let Err(error) = storage.push_task(TaskBuilder::new(tick).idempotency_key(&key).build()).await {
        let error = error.to_string();
        if error.contains("idempotency_key") {
            return; // another instance was first
        }
        eprintln!("{error}");
        sleep(Duration::from_secs(1)).await;
    }
}

async fn work(tick: Tick, name: Data<String>, pool: Data<PgPool>) -> Result<(), BoxDynError> {
    let slot: DateTime<Utc> = DateTime::from_timestamp(tick.get_timestamp().try_into()?, 0).ok_or("no time")?;
    let takes: u64 = env::var("CHAOS_WORK_MS")?.parse()?;
    let id: i64 = sqlx::query_scalar("INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id")
        .bind(name.to_string())
        .bind(slot)
        .bind(env::var("CHAOS_INSTANCE")?)
        .fetch_one(&*pool)
        .await?;
    sleep(Duration::from_millis(takes)).await;
    let ended = sqlx::query("UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1").bind(id);
    ended.execute(&*pool).await?;
    Ok(())
}
