//! The job as a schedule: a tick each second, which runs once, on whichever instance.

use std::{collections::BTreeMap, time::Duration};

use rowlock::{
    Database, Schedule, Schedules, Tick,
    admin::{RunInfo, RunStatus},
    jobs::CatchUp,
};
use sqlx::Pool;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

use crate::{
    Result,
    stage::{Instance, Stage, heading, say},
};

const PERIOD: Duration = Duration::from_secs(1);
/// A tick is run again elsewhere after this long without a renewal.
const LEASE: Duration = Duration::from_millis(1500);
const WORK: Duration = Duration::from_millis(400);
const DOWN: Duration = Duration::from_secs(3);
const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];

/// Runs ticks until the process is asked to end.
pub async fn instance<DB: Database>(pool: Pool<DB>, name: &str, node: &str) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let schedule = Schedule::every(name, PERIOD).catch_up(CatchUp::All(100));
    let schedules = Schedules::new(pool).label(node).lease(LEASE).on(schedule, job);
    let running = schedules.start().await?;
    terminate.recv().await;
    running.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

async fn job<DB: Database>(tick: Tick<DB>) -> std::result::Result<(), String> {
    let (slot, token) = (tick.slot().format("%H:%M:%S").to_string(), tick.token());
    let from =
        tick.taken_over_from().map(|prior| format!(", attempt {}, taken over from {}", tick.attempt(), prior.label));
    say("runs", token, &format!("tick {slot}{}", from.unwrap_or_default()));
    // The work is dropped when the run is lost. A task of its own tells that.
    let (lost, shown) = (tick.cancellation_token(), slot.clone());
    let watch = tokio::spawn(async move {
        lost.cancelled().await;
        say("lost", token, &format!("tick {shown}: the work is cancelled"));
    });
    for _ in 0..20 {
        sleep(WORK / 20).await;
    }
    watch.abort();
    say("done", token, &format!("tick {slot}"));
    Ok(())
}

pub async fn show<DB: Database>(stage: &mut Stage, pool: Pool<DB>, name: &str) -> Result<()> {
    heading("A schedule. It ticks each second on three instances: one of them runs each tick.");
    let mut nodes = Nodes { name, all: Vec::new() };
    for node in NODES {
        nodes.start(stage, node)?;
    }
    wait_for_ticks(stage, 3).await?;

    heading("Twice, the instance that runs a tick is killed in the middle of it. Another one finishes the tick.");
    for _ in 0..2 {
        nodes.kill_in_a_tick(stage).await?;
    }

    heading("The instance that runs a tick is paused for longer than its lease (SIGSTOP).");
    nodes.pause_in_a_tick(stage).await?;

    heading("All instances are killed. For three seconds nothing runs. Two that start then catch up on each tick.");
    nodes.kill_all(stage).await?;
    sleep(DOWN).await;
    for node in &NODES[..2] {
        nodes.start(stage, node)?;
    }
    wait_for_ticks(stage, 14).await?;

    heading("The instances are asked to end (SIGTERM): they finish the tick that runs.");
    nodes.end(stage).await?;

    heading("The history:");
    let mut runs = Schedules::new(pool).history(name, 1000).await?;
    runs.reverse();
    println!("tick      attempt  status     began after  by");
    for run in &runs {
        let late = (run.began - run.slot).num_milliseconds();
        let (slot, status) = (run.slot.format("%H:%M:%S"), status(run));
        println!("{slot}  {:>7}  {status:<9}  {late:>8} ms  {}", run.attempt, run.by);
    }
    println!("\n{}", judge(&runs)?);
    Ok(())
}

/// Waits until this many ticks are done.
async fn wait_for_ticks(stage: &mut Stage, number: u32) -> Result<()> {
    for _ in 0..number {
        stage.until(|line| line.what == "done").await?;
    }
    Ok(())
}

fn status(run: &RunInfo) -> &'static str {
    match run.status {
        RunStatus::Succeeded => "succeeded",
        RunStatus::Lost => "lost",
        RunStatus::Missed => "missed",
        _ => "failed",
    }
}

/// Counts how often each tick succeeded, from the first to the last one. It has to be once.
fn judge(runs: &[RunInfo]) -> Result<String> {
    let mut successes = BTreeMap::new();
    for run in runs {
        *successes.entry(run.slot).or_insert(0) += u32::from(run.status == RunStatus::Succeeded);
    }
    let slots: Vec<_> = successes.keys().collect();
    if slots.windows(2).any(|two| (*two[1] - *two[0]).to_std() != Ok(PERIOD)) {
        return Err("a tick is missing".into());
    }
    if let Some((slot, times)) = successes.iter().find(|(_, times)| **times != 1) {
        return Err(format!("the tick {slot} succeeded {times} times").into());
    }
    let lost = runs.iter().filter(|run| run.status == RunStatus::Lost).count();
    let ticks = slots.len();
    Ok(format!("{ticks} ticks, each of them succeeded once; {lost} runs were lost on the way."))
}

/// The instances that run.
struct Nodes<'a> {
    name: &'a str,
    all: Vec<Instance>,
}

impl Nodes<'_> {
    fn start(&mut self, stage: &Stage, node: &str) -> Result<()> {
        self.all.push(stage.start(node, &["ticks", self.name, node])?);
        Ok(())
    }

    /// Waits until a tick runs, and returns the place of its instance.
    async fn running(&self, stage: &mut Stage) -> Result<usize> {
        loop {
            let line = stage.until(|line| line.what == "runs").await?;
            if let Some(at) = self.all.iter().position(|instance| instance.node == line.node) {
                return Ok(at);
            }
        }
    }

    /// Kills the instance that runs a tick, until a tick was taken over: on a slow machine, a tick
    /// may end before its instance is killed. The killed instances start again.
    async fn kill_in_a_tick(&mut self, stage: &mut Stage) -> Result<()> {
        loop {
            let at = self.running(stage).await?;
            let mut victim = self.all.swap_remove(at);
            victim.kill().await?;
            stage.note(&victim.node, "killed", "its lease runs out");
            let next = stage.until(|line| line.what == "runs").await?;
            self.start(stage, &victim.node)?;
            if next.detail.contains("taken over") {
                return Ok(());
            }
        }
    }

    /// Stops the instance that runs a tick until another one has taken the tick over.
    async fn pause_in_a_tick(&mut self, stage: &mut Stage) -> Result<()> {
        loop {
            let at = self.running(stage).await?;
            let paused = &self.all[at];
            paused.signal("-STOP").await?;
            stage.note(&paused.node, "paused", "its lease runs out");
            let next = stage.until(|line| line.what == "runs").await?;
            paused.signal("-CONT").await?;
            stage.note(&paused.node, "goes on", "");
            if next.detail.contains("taken over") {
                let node = paused.node.clone();
                stage.until(|line| line.node == node && ["lost", "done"].contains(&line.what.as_str())).await?;
                return Ok(());
            }
        }
    }

    async fn kill_all(&mut self, stage: &mut Stage) -> Result<()> {
        for mut victim in self.all.drain(..) {
            victim.kill().await?;
            stage.note(&victim.node, "killed", "");
        }
        Ok(())
    }

    async fn end(&mut self, stage: &mut Stage) -> Result<()> {
        for instance in &self.all {
            instance.signal("-TERM").await?;
        }
        stage.wait(std::mem::take(&mut self.all)).await
    }
}
