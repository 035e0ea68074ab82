//! `/metrics`: what the database says, in the text format of Prometheus.
//!
//! The metrics are those of the last look, so each scrape makes its own registry: what is gone from
//! the database is gone from the metrics.

use std::{
    sync::atomic::{AtomicI64, AtomicU64},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use chrono::TimeDelta;
use prometheus_client::{
    encoding::text::encode,
    metrics::{family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use rowlock::admin::ScheduleInfo;
use tokio::time::timeout;

use crate::{
    schedule::state::has_next,
    ui::{
        guard::{HEALTH, METRICS},
        locks::STATES,
        looks::{Looks, View},
        snapshot::{Part, Snapshot},
    },
};

const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a scrape waits for a look. Prometheus waits for ten seconds, unless it is told
/// otherwise.
const LONGEST: Duration = Duration::from_secs(8);
/// The most names of semaphores that have a number of their own.
const MAX_NAMES: usize = 200;

/// What programs ask for.
pub fn routes<S: Clone + Send + Sync + 'static>(looks: Looks) -> Router<S> {
    Router::new().route(METRICS, get(metrics)).route(HEALTH, get(health)).with_state(looks)
}

async fn metrics(State(looks): State<Looks>) -> Response {
    match text(&seen(&looks).await) {
        Ok(text) => ([(header::CONTENT_TYPE, KIND)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Says whether the database can be read.
async fn health(State(looks): State<Looks>) -> Response {
    let view = seen(&looks).await;
    match (&view.problem, view.is_old()) {
        (Some(_), _) => (StatusCode::SERVICE_UNAVAILABLE, "the database cannot be read\n").into_response(),
        (None, true) => (StatusCode::SERVICE_UNAVAILABLE, "the database does not answer\n").into_response(),
        (None, false) => "ok\n".into_response(),
    }
}

/// A scrape that is not answered has no `rowlock_up` that an alert could see.
async fn seen(looks: &Looks) -> View {
    timeout(LONGEST, looks.fresh()).await.unwrap_or_else(|_| looks.last())
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

fn register(registry: &mut Registry, name: &str, help: &str, number: i64) {
    let gauge = Number::default();
    gauge.set(number);
    registry.register(name, help, gauge);
}

fn of_locks(registry: &mut Registry, snapshot: &Snapshot) {
    let keys = Family::<Labels<1>, Number>::default();
    for state in STATES {
        let count = snapshot.locks.iter().filter(|lock| lock.state == state).count();
        keys.get_or_create(&[("state", state.name().to_owned())]).set(number(count));
    }
    registry.register("keys", "Keys with a row, by their state", keys);

    let permits = Family::<Labels<1>, Number>::default();
    let in_use = snapshot.in_use();
    for (name, used) in in_use.iter().filter(|(_, used)| used.permits > 0).take(MAX_NAMES) {
        permits.get_or_create(&[("name", (*name).to_owned())]).set(number(used.permits));
    }
    registry.register("permits_in_use", "Held permits of a semaphore; the first 200 names that have any", permits);
    let readers: usize = in_use.values().map(|used| used.readers).sum();
    register(registry, "readers", "Readers of all read-write locks", number(readers));
}

fn of_queues(registry: &mut Registry, snapshot: &Snapshot) {
    let waiting: u64 = snapshot.waiting.values().sum();
    register(registry, "queued", "Waiters in the queues of all keys: those that wait in order", number(waiting));
    let longest = snapshot.waiting.values().max().copied().unwrap_or_default();
    register(registry, "longest_queue", "Waiters of the key that has the most", number(longest));
}

/// The metrics of jobs: each is a number, or a time, of each job.
struct OfJobs<'a> {
    registry: &'a mut Registry,
    jobs: &'a [ScheduleInfo],
}

impl OfJobs<'_> {
    fn number(&mut self, name: &str, help: &str, number: impl Fn(&ScheduleInfo) -> i64) {
        let family = Family::<Labels<1>, Number>::default();
        for job in self.jobs {
            family.get_or_create(&[("job", job.name.clone())]).set(number(job));
        }
        self.registry.register(name, help, family);
    }

    /// Adds a time that not every job has.
    fn time(&mut self, name: &str, help: &str, time: impl Fn(&ScheduleInfo) -> Option<TimeDelta>) {
        let family = Family::<Labels<1>, Seconds>::default();
        for (job, time) in self.jobs.iter().filter_map(|job| Some((job, time(job)?))) {
            family.get_or_create(&[("job", job.name.clone())]).set(time.as_seconds_f64().max(0.0));
        }
        self.registry.register_with_unit(name, help, Unit::Seconds, family);
    }
}

fn of_jobs(registry: &mut Registry, snapshot: &Snapshot) {
    let mut of = OfJobs { registry, jobs: &snapshot.jobs };
    of.number("job_paused", "Whether the job is paused", |job| job.paused.into());
    of.number("job_running", "Whether a run is under way", |job| job.running.into());
    of.number("job_removed", "Whether the job was removed from the application", |job| job.is_removed().into());
    let help = "Whether a clock that was ahead has left the job's slot far ahead";
    of.number("job_clock_ahead", help, |job| job.clock_was_ahead.into());
    let instances = Family::<Labels<2>, Number>::default();
    for job in &snapshot.jobs {
        for (times, number) in [("effective", job.instances), ("other", job.instances_with_other_times)] {
            instances.get_or_create(&[("job", job.name.clone()), ("times", times.to_owned())]).set(number.into());
        }
    }
    let help = "Living instances that declare the job: with the times that are in effect, or with other ones";
    of.registry.register("job_instances", help, instances);
    let builds = Family::<Labels<1>, Number>::default();
    for instance in snapshot.instances.iter().filter(|instance| instance.alive) {
        builds.get_or_create(&[("build", instance.build.clone())]).inc();
    }
    of.registry.register("instances", "Living instances that run jobs, by their build", builds);
    of.time("job_late", "Time since the job was due without being run", |job| {
        Some(if job.running || !has_next(job) { TimeDelta::zero() } else { snapshot.now - job.due })
    });
    of.time("job_running", "Time since the run that is under way began", |job| {
        job.since.filter(|_| job.running).map(|since| snapshot.now - since)
    });
}

fn of_runs(registry: &mut Registry, snapshot: &Snapshot) {
    let mut of = OfJobs { registry, jobs: &snapshot.jobs };
    let help = "Whether the last run failed or was lost";
    of.number("job_failed", help, |job| snapshot.runs.last_failed(&job.name).into());
    let help = "Ticks of the last week that were not run in time";
    of.number("job_missed", help, |job| number(snapshot.missed_in_a_week(&job.name)));
    of.time("job_since_success", "Time since the last success ended", |job| {
        snapshot.runs.last_success(&job.name).map(|ended| snapshot.now - ended)
    });
    of.time("job_last_duration", "Duration of the last run", |job| {
        snapshot.runs.last(&job.name).map(|run| run.ended - run.began)
    });
}

fn number<N: TryInto<i64>>(count: N) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use super::*;

    #[test]
    fn numbers_of_an_old_look_are_not_published() {
        let numbers = |fresh_for| {
            let snapshot = Some(Arc::new(Snapshot::default()));
            let began = Instant::now();
            std::thread::sleep(Duration::from_millis(10));
            text(&View { began, fresh_for, snapshot, problem: None }).unwrap()
        };
        let young = numbers(Duration::from_secs(60));
        assert!(young.contains("rowlock_up 1\n") && young.contains("rowlock_readers 0\n"), "{young}");
        let old = numbers(Duration::from_millis(1));
        assert!(old.contains("rowlock_up 0\n") && !old.contains("rowlock_readers"), "{old}");
    }
}
