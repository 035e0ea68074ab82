//! The job under a lock: one run for each minimum interval.

use std::time::Duration;

use rowlock::{Attempt, Database, Held, LeaseLock, RunError, Status};
use sqlx::Pool;
use tokio::time::sleep;

use crate::{
    Result,
    stage::{Instance, Stage, heading, say},
};

/// The job is started every 5 s here. Half of that prevents a second run, and never refuses one
/// that comes early.
const MIN_INTERVAL: Duration = Duration::from_millis(2500);
/// A killed instance is replaced after this time at most.
const LEASE: Duration = Duration::from_secs(2);

/// Tries to run the job.
pub async fn instance<DB: Database>(
    pool: Pool<DB>,
    key: &str,
    node: &str,
    work_millis: u64,
    tries: &str,
) -> Result<()> {
    let lock = LeaseLock::builder(pool).label(node).build()?.lease(LEASE).min_interval(MIN_INTERVAL);
    let work = async |held: Held| {
        let from =
            held.taken_over_from().map(|prior| format!("taken over from {} (token {})", prior.label, prior.token));
        say("runs", held.token(), from.as_deref().unwrap_or_default());
        sleep(Duration::from_millis(work_millis)).await;
        Ok::<_, String>(held.token())
    };
    loop {
        match lock.run(key, Duration::ZERO, work).await {
            Ok(token) => say("done", token, "recorded as S"),
            Err(RunError::Work(error)) => say("failed", "", &error),
            Err(RunError::Lost { token, .. }) => say("lost", token, "work cancelled"),
            Err(RunError::Other(error)) => return Err(error.into()),
            Err(RunError::Refused(refusal)) if tries == "once" => {
                let until = refusal.until.map(|until| format!(" until {}", until.format("%H:%M:%S%.3f")));
                say("refused", "", &format!("{}, by {}{}", refusal.reason, refusal.by, until.unwrap_or_default()));
            }
            Err(RunError::Refused(refusal)) => {
                sleep(refusal.retry_after.unwrap_or(LEASE).min(Duration::from_millis(100))).await;
                continue;
            }
        }
        return Ok(());
    }
}

pub async fn show<DB: Database>(stage: &mut Stage, pool: &Pool<DB>, key: &str) -> Result<()> {
    let start = |stage: &Stage, node: &str, work_millis: &str, tries: &str| -> Result<Instance> {
        stage.start(node, &["locked", key, node, work_millis, tries])
    };
    heading("A lock. Four instances want to run the job at once: one runs it.");
    let mut all = Vec::new();
    for node in ["node-1", "node-2", "node-3", "node-4"] {
        all.push(start(stage, node, "500", "once")?);
    }
    stage.until(|line| line.what == "done").await?;
    stage.wait(all).await?;

    heading("A fifth one comes a moment later: the minimum interval refuses it.");
    let late = start(stage, "node-5", "500", "once")?;
    stage.wait(vec![late]).await?;
    sleep(MIN_INTERVAL).await;

    heading("The instance that runs the job is killed in the middle of it (SIGKILL).");
    let mut victim = start(stage, "node-1", "60000", "once")?;
    stage.until(|line| line.what == "runs").await?;
    let others = vec![start(stage, "node-2", "500", "once")?, start(stage, "node-3", "500", "once")?];
    stage.wait(others).await?;
    victim.kill().await?;
    stage.note("node-1", "killed", "its lease runs out");

    heading("Another one tries until it may: it takes over when the lease of the killed one ends.");
    let successor = start(stage, "node-4", "500", "until it may")?;
    stage.until(|line| line.what == "done").await?;
    stage.wait(vec![successor]).await?;

    heading("What the row says in the end:");
    let lock = LeaseLock::new(pool.clone()).min_interval(MIN_INTERVAL);
    let Attempt::Refused(refusal) = lock.try_acquire(key).await? else {
        return Err("the minimum interval should have refused this".into());
    };
    println!("         {refusal}  (the last run ended with {})", Status::Succeeded.letter());
    Ok(())
}
