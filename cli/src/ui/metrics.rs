//! `/metrics`: what the database says, in the text format of Prometheus.
//!
//! The metrics are those of the last look, so each scrape makes its own registry: what is gone from
//! the database is gone from the metrics.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64},
    },
    time::Duration,
};

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use prometheus_client::{
    encoding::text::encode,
    metrics::{family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use rowlock::admin::{LockState, RunStatus};
use tokio::time::timeout;

use crate::{
    schedule::state::has_next,
    ui::{
        app::App,
        looks::View,
        snapshot::{Part, Snapshot},
    },
};

const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a scrape waits for a look. Prometheus waits for ten seconds, unless it is told
/// otherwise.
const LONGEST: Duration = Duration::from_secs(8);
/// The most names of semaphores that have a number of their own.
const MAX_NAMES: usize = 200;

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    // A scrape that is not answered has no `rowlock_up` that an alert could see.
    let view = timeout(LONGEST, app.looks.fresh()).await.unwrap_or_else(|_| app.looks.last());
    match text(&view) {
        Ok(text) => ([(header::CONTENT_TYPE, KIND)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Says whether the database can be read.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let view = timeout(LONGEST, app.looks.fresh()).await.unwrap_or_else(|_| app.looks.last());
    match (&view.problem, view.is_old()) {
        (Some(_), _) => (StatusCode::SERVICE_UNAVAILABLE, "the database cannot be read\n").into_response(),
        (None, true) => (StatusCode::SERVICE_UNAVAILABLE, "the database does not answer\n").into_response(),
        (None, false) => "ok\n".into_response(),
    }
}

type Number = Gauge<i64, AtomicI64>;
type Seconds = Gauge<f64, AtomicU64>;

type Labels<const N: usize> = [(&'static str, String); N];

/// Returns all metrics. While the database does not answer, and if the last look is old, there is
/// one: `rowlock_up`. The metrics of a table that could not be read are left out.
fn text(view: &View) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("rowlock");
    let up = Number::default();
    registry.register("up", "Whether the last look at the database could read everything", up.clone());
    if let (Some(snapshot), None, false) = (&view.snapshot, &view.problem, view.is_old()) {
        // No metric counts changes, which a job's own user need not be able to read.
        up.set(snapshot.unread.iter().all(|unread| unread.part == Part::Changes).into());
        if !snapshot.lacks(Part::Locks) {
            of_locks(&mut registry, snapshot);
        }
        if !snapshot.lacks(Part::Locks) && !snapshot.lacks(Part::Queues) {
            of_queues(&mut registry, snapshot);
        }
        if !snapshot.lacks(Part::Schedules) {
            of_jobs(&mut registry, snapshot);
        }
        if !snapshot.lacks(Part::Schedules) && !snapshot.lacks(Part::Runs) {
            of_runs(&mut registry, snapshot);
        }
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn of_locks(registry: &mut Registry, snapshot: &Snapshot) {
    let keys = Family::<Labels<1>, Number>::default();
    for state in [
        LockState::Held,
        LockState::Expired,
        LockState::HeldByAnotherProgram,
        LockState::WithinWindow,
        LockState::Failed,
        LockState::Free,
    ] {
        let count = snapshot.locks.iter().filter(|lock| lock.state == state).count();
        keys.get_or_create(&[("state", state.name().to_owned())]).set(number(count));
    }
    registry.register("keys", "Keys with a row, by their state", keys);

    let (permits, readers) = (Family::<Labels<1>, Number>::default(), Number::default());
    let in_use = snapshot.in_use();
    for (name, used) in in_use.iter().filter(|(_, used)| used.permits > 0).take(MAX_NAMES) {
        permits.get_or_create(&[("name", (*name).to_owned())]).set(number(used.permits));
    }
    readers.set(number(in_use.values().map(|used| used.readers).sum::<usize>()));
    registry.register("permits_in_use", "Held permits of a semaphore; the first 200 names that have any", permits);
    registry.register("readers", "Readers of all read-write locks", readers);
}

fn of_queues(registry: &mut Registry, snapshot: &Snapshot) {
    let waiting = Number::default();
    waiting.set(number(snapshot.waiting.values().sum::<u64>()));
    registry.register("queued", "Waiters in the queues of all keys: those that wait in order", waiting);
    let longest = Number::default();
    longest.set(number(snapshot.waiting.values().max().copied().unwrap_or_default()));
    registry.register("longest_queue", "Waiters of the key that has the most", longest);
}

fn of_jobs(registry: &mut Registry, snapshot: &Snapshot) {
    let [paused, running, removed, ahead] = std::array::from_fn(|_| Family::<Labels<1>, Number>::default());
    let instances = Family::<Labels<2>, Number>::default();
    let [late, under_way] = std::array::from_fn(|_| Family::<Labels<1>, Seconds>::default());
    for job in &snapshot.jobs {
        let of = [("job", job.name.clone())];
        paused.get_or_create(&of).set(job.paused.into());
        running.get_or_create(&of).set(job.running.into());
        removed.get_or_create(&of).set(job.is_removed().into());
        ahead.get_or_create(&of).set(job.clock_was_ahead.into());
        for (times, number) in [("effective", job.instances), ("other", job.instances_with_other_times)] {
            instances.get_or_create(&[("job", job.name.clone()), ("times", times.to_owned())]).set(number.into());
        }
        let overdue = if job.running || !has_next(job) { 0.0 } else { seconds(snapshot.now - job.due) };
        late.get_or_create(&of).set(overdue);
        if let Some(since) = job.since.filter(|_| job.running) {
            under_way.get_or_create(&of).set(seconds(snapshot.now - since));
        }
    }
    registry.register("job_paused", "Whether the job is paused", paused);
    registry.register("job_running", "Whether a run is under way", running);
    registry.register("job_removed", "Whether the job was removed from the application", removed);
    registry.register("job_clock_ahead", "Whether a clock that was ahead has left the job's slot far ahead", ahead);
    let help = "Living instances that declare the job: with the times that are in effect, or with other ones";
    registry.register("job_instances", help, instances);
    let builds = Family::<Labels<1>, Number>::default();
    for instance in snapshot.instances.iter().filter(|instance| instance.alive) {
        builds.get_or_create(&[("build", instance.build.clone())]).inc();
    }
    registry.register("instances", "Living instances that run jobs, by their build", builds);
    let help = "Time since the job was due without being run";
    registry.register_with_unit("job_late", help, Unit::Seconds, late);
    registry.register_with_unit("job_running", "Time since the run that is under way began", Unit::Seconds, under_way);
}

fn of_runs(registry: &mut Registry, snapshot: &Snapshot) {
    let [failed, missed] = std::array::from_fn(|_| Family::<Labels<1>, Number>::default());
    let [success, duration] = std::array::from_fn(|_| Family::<Labels<1>, Seconds>::default());
    for job in &snapshot.jobs {
        let of = [("job", job.name.clone())];
        missed.get_or_create(&of).set(number(snapshot.missed_in_a_week(&job.name)));
        let last = snapshot.runs.of(&job.name).find(|run| run.status != RunStatus::Missed);
        failed.get_or_create(&of).set(last.is_some_and(|run| run.status != RunStatus::Succeeded).into());
        if let Some(run) = last {
            duration.get_or_create(&of).set(seconds(run.ended - run.began));
        }
        if let Some(ended) = snapshot.runs.last_success(&job.name) {
            success.get_or_create(&of).set(seconds(snapshot.now - ended));
        }
    }
    registry.register("job_failed", "Whether the last run failed or was lost", failed);
    registry.register("job_missed", "Ticks of the last week that were not run in time", missed);
    let mut in_seconds = |name, help, family| registry.register_with_unit(name, help, Unit::Seconds, family);
    in_seconds("job_since_success", "Time since the last success ended", success);
    in_seconds("job_last_duration", "Duration of the last run", duration);
}

fn seconds(duration: chrono::TimeDelta) -> f64 {
    duration.as_seconds_f64().max(0.0)
}

fn number<N: TryInto<i64>>(count: N) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use chrono::Utc;

    use super::*;

    #[test]
    fn numbers_of_an_old_look_are_not_published() {
        let numbers = |fresh_for| {
            let (locks, waiting, jobs, instances, changes, unread) = Default::default();
            let runs = Arc::default();
            let snapshot = Snapshot { now: Utc::now(), locks, waiting, jobs, runs, instances, changes, unread };
            let began = Instant::now();
            std::thread::sleep(Duration::from_millis(10));
            text(&View { number: 1, began, fresh_for, snapshot: Some(Arc::new(snapshot)), problem: None }).unwrap()
        };
        let young = numbers(Duration::from_secs(60));
        assert!(young.contains("rowlock_up 1\n") && young.contains("rowlock_readers 0\n"), "{young}");
        let old = numbers(Duration::from_millis(1));
        assert!(old.contains("rowlock_up 0\n") && !old.contains("rowlock_readers"), "{old}");
    }
}
