//! Counters, gauges and histograms through the `metrics` facade, if the feature is enabled.
//! `docs/operating.md` lists their names.

#![cfg_attr(not(feature = "metrics"), allow(unused_variables, dead_code))]

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Mutex,
    time::Duration,
};

use crate::{rules::Reason, session::time::Instant, sync::lock};

#[cfg(feature = "metrics")]
mod published {
    use std::sync::atomic::{AtomicBool, Ordering};

    use metrics::{Label, Unit, describe_counter, describe_gauge, describe_histogram};

    static BY_KEY: AtomicBool = AtomicBool::new(false);

    /// Adds the label `key` to the metrics of keys and schedules, or omits it. By default it is
    /// omitted.
    ///
    /// Each key then has a series of its own, so the application should have few keys. For a lease
    /// on several keys, the label is the first key.
    ///
    /// ```
    /// rowlock::label_metrics_by_key(true);
    /// ```
    pub fn label_metrics_by_key(enabled: bool) {
        BY_KEY.store(enabled, Ordering::Relaxed);
    }

    /// Bounds of buckets that fit all histograms, in seconds: from a millisecond to a day.
    pub const METRIC_BUCKETS: [f64; 16] =
        [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0, 3_600.0, 14_400.0, 86_400.0];

    /// Describes all metrics, with their units, to the recorder that is installed.
    ///
    /// ```
    /// rowlock::describe_metrics(); // after the application has installed its recorder
    /// ```
    pub fn describe_metrics() {
        let counters = [
            ("rowlock_acquired_total", "Claims that were granted"),
            ("rowlock_refused_total", "Claims that were refused, by reason"),
            ("rowlock_taken_over_total", "Granted claims that took over from a holder that had not ended its claim"),
            ("rowlock_lost_total", "Leases that were lost"),
            ("rowlock_renewals_failed_total", "Renewals without a reply; the leases still stand"),
            ("rowlock_conflicts_total", "Attempts at a transaction or an update that failed because of a conflict"),
            ("rowlock_runs_total", "Runs of schedules, by outcome"),
            ("rowlock_slots_put_back_total", "Slots of schedules that were corrected, since the clock was ahead"),
            ("rowlock_events_dropped_total", "Events that were dropped because a subscriber blocked"),
            ("rowlock_stalls_total", "Times that a thread of the library stood still for a second, by thread"),
            ("rowlock_database_errors_total", "Statements without a result, by kind; most are sent again"),
        ];
        for (name, text) in counters {
            describe_counter!(name, Unit::Count, text);
        }
        describe_gauge!("rowlock_held", Unit::Count, "Leases that this process holds or is ending");
        describe_gauge!(
            "rowlock_longest_hold_seconds",
            Unit::Seconds,
            "For how long this process has held the lease that it has held for the longest, as of its last renewal"
        );
        describe_gauge!("rowlock_waiting", Unit::Count, "Calls of this process that wait for a key");
        let histograms = [
            ("rowlock_wait_seconds", "Time from the call of acquire to the grant"),
            ("rowlock_hold_seconds", "Time from the grant to the end of the lease"),
            ("rowlock_renewal_seconds", "Duration of a batch of renewals, attempts included"),
            ("rowlock_run_seconds", "Duration of a run of a schedule, by outcome"),
            ("rowlock_start_delay_seconds", "Time from a tick to the claim of its run"),
        ];
        for (name, text) in histograms {
            describe_histogram!(name, Unit::Seconds, text);
        }
    }

    /// The label `key`, if it is wanted.
    pub fn key_label(key: &str) -> Vec<Label> {
        if BY_KEY.load(Ordering::Relaxed) { vec![Label::new("key", key.to_owned())] } else { Vec::new() }
    }
}

#[cfg(feature = "metrics")]
pub use published::{METRIC_BUCKETS, describe_metrics, label_metrics_by_key};

/// Counts, with labels of its own beside that of the key.
macro_rules! count {
    ($name:literal, $by:expr $(, $label:literal => $value:expr)* $(; $key:expr)?) => {{
        #[cfg(feature = "metrics")]
        {
            let labels = vec![$(metrics::Label::new($label, $value)),*];
            $(let labels = [labels, published::key_label($key)].concat();)?
            metrics::counter!($name, labels).increment($by);
        }
    }};
}

macro_rules! observe {
    ($name:literal, $duration:expr $(, $label:literal => $value:expr)* $(; $key:expr)?) => {{
        #[cfg(feature = "metrics")]
        {
            let labels = vec![$(metrics::Label::new($label, $value)),*];
            $(let labels = [labels, published::key_label($key)].concat();)?
            metrics::histogram!($name, labels).record($duration.as_secs_f64());
        }
    }};
}

/// Something that is counted while it lasts.
pub struct Counted(&'static str);

impl Counted {
    /// A call that waits for a key.
    pub fn waiter() -> Self {
        Self::new("rowlock_waiting")
    }

    fn new(name: &'static str) -> Self {
        #[cfg(feature = "metrics")]
        metrics::gauge!(name).increment(1.0);
        Self(name)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        #[cfg(feature = "metrics")]
        metrics::gauge!(self.0).decrement(1.0);
    }
}

/// Since when the leases of this process are held, and how many since each moment.
static HELD: Mutex<BTreeMap<Instant, usize>> = Mutex::new(BTreeMap::new());

/// A lease of this process, until its end has been recorded.
pub struct Held {
    since: Instant,
    _counted: Counted,
}

impl Held {
    pub fn begins() -> Self {
        let since = Instant::now();
        if cfg!(feature = "metrics") {
            *lock(&HELD).entry(since).or_default() += 1;
        }
        Self { since, _counted: Counted::new("rowlock_held") }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if cfg!(feature = "metrics") {
            if let Entry::Occupied(mut since) = lock(&HELD).entry(self.since) {
                *since.get_mut() -= 1;
                if *since.get() == 0 {
                    since.remove();
                }
            }
            publish_longest_hold();
        }
    }
}

/// Publishes for how long the lease that is held for the longest has been.
fn publish_longest_hold() {
    #[cfg(feature = "metrics")]
    {
        let longest = lock(&HELD).first_key_value().map_or(Duration::ZERO, |(since, _)| since.elapsed());
        metrics::gauge!("rowlock_longest_hold_seconds").set(longest.as_secs_f64());
    }
}

/// Counts a claim that was granted, on keys of which this is the first.
pub fn acquired(key: &str, taken_over: bool) {
    count!("rowlock_acquired_total", 1; key);
    if taken_over {
        count!("rowlock_taken_over_total", 1; key);
    }
}

pub fn refused(key: &str, reason: Reason) {
    count!("rowlock_refused_total", 1, "reason" => reason.name(); key);
}

/// Records the time from the call of `acquire` to the grant.
pub fn waited(key: &str, time: Duration) {
    observe!("rowlock_wait_seconds", time; key);
}

/// Returns what records the time from the grant to the end of the lease, for whatever reason it
/// ended, under the label of this moment.
pub fn held(key: &str, time: Duration) -> impl FnOnce() + Send + 'static {
    #[cfg(feature = "metrics")]
    let labels = published::key_label(key);
    move || {
        #[cfg(feature = "metrics")]
        metrics::histogram!("rowlock_hold_seconds", labels).record(time.as_secs_f64());
    }
}

/// Records how long the replies to a batch of renewals took.
pub fn renewed(time: Duration) {
    observe!("rowlock_renewal_seconds", time);
    publish_longest_hold();
}

/// Counts leases whose renewal in the background received no reply. The leases still stand.
pub fn renewals_failed(leases: usize) {
    count!("rowlock_renewals_failed_total", leases as u64);
}

/// Returns what counts a loss, under the label of this moment.
pub fn lost(key: &str) -> impl FnOnce() + Send + 'static {
    #[cfg(feature = "metrics")]
    let labels = published::key_label(key);
    move || {
        #[cfg(feature = "metrics")]
        metrics::counter!("rowlock_lost_total", labels).increment(1);
    }
}

/// Counts an attempt at a transaction or an update that failed because of a conflict.
pub fn conflict() {
    count!("rowlock_conflicts_total", 1);
}

/// Records how long after its tick a run was claimed.
#[cfg(feature = "schedule")]
pub fn started(schedule: &str, delay: Duration) {
    observe!("rowlock_start_delay_seconds", delay; schedule);
}

/// Counts a run that is over, and records how long it took.
#[cfg(feature = "schedule")]
pub fn ran(schedule: &str, outcome: &'static str, time: Duration) {
    count!("rowlock_runs_total", 1, "outcome" => outcome; schedule);
    observe!("rowlock_run_seconds", time, "outcome" => outcome; schedule);
}

/// Counts a slot that was corrected, since the clock of the database was ahead.
#[cfg(feature = "schedule")]
pub fn slot_put_back(schedule: &str) {
    count!("rowlock_slots_put_back_total", 1; schedule);
}

/// Counts events that were not emitted, because too many waited for a subscriber that blocked.
pub fn events_dropped(count: usize) {
    count!("rowlock_events_dropped_total", count as u64);
}

/// Counts that a thread of the library stood still.
pub fn stands_still(thread: &'static str) {
    count!("rowlock_stalls_total", 1, "thread" => thread);
}

/// Counts a statement that has no result.
pub fn database_error(kind: &'static str) {
    count!("rowlock_database_errors_total", 1, "kind" => kind);
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use ::metrics::with_local_recorder;
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;

    #[test]
    fn the_longest_hold_is_published_with_each_renewal() {
        const HOLD: Duration = Duration::from_millis(20);
        let held = Held::begins();
        std::thread::sleep(HOLD);
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        with_local_recorder(&recorder, || renewed(Duration::ZERO));
        let published = snapshotter.snapshot().into_vec();
        let longest = published.iter().find(|(key, ..)| key.key().name() == "rowlock_longest_hold_seconds").unwrap();
        assert!(matches!(longest.3, DebugValue::Gauge(longest) if longest.into_inner() >= HOLD.as_secs_f64()));
        let since = held.since;
        drop(held);
        assert!(!lock(&HELD).contains_key(&since));
    }
}
