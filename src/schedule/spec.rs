//! What a schedule is: how its times and its terms are set.

use std::time::Duration;

use chrono::TimeDelta;

use crate::{
    invalid::{Faults, Invalid},
    key::Key,
    retry::{DAY, within},
    schedule::{
        cron::Pattern,
        declarations::hash,
        terms::{Backoff, CatchUp, Retries, YEAR},
        zones::Zone,
    },
};

const LEAST: Duration = Duration::from_millis(100);
const PERIODS: &str = "it has to be from 100 ms to 366 days, in whole milliseconds";
/// How the text of a fixed delay begins.
pub(super) const AFTER: &str = "after ";
/// The most characters of a description.
const DESCRIPTION: usize = 1_000;
/// The longest text of a pattern.
const PATTERN: usize = 200;

#[derive(Clone, Debug)]
pub(super) enum Timing {
    /// Without a pattern if it is not possible.
    Cron {
        pattern: Option<Box<Pattern>>,
    },
    Every(TimeDelta),
    After(TimeDelta),
}

/// A schedule: a name, the times of its ticks, and what happens with ticks that are late or fail.
///
/// All instances that know the schedule share its row in the table `t_resource_schedule`.
///
/// ```
/// use std::time::Duration;
/// use rowlock::{Schedule, jobs::CatchUp};
///
/// let report = Schedule::cron("nightly-report", "30 2 * * *")
///     .zone("Europe/Berlin")
///     .catch_up(CatchUp::Skip)
///     .grace(Duration::from_secs(5 * 60))
///     .retry(3, Duration::from_secs(10)..Duration::from_secs(600));
/// let refresh = Schedule::every("refresh", Duration::from_secs(30));
/// let sweep = Schedule::after("sweep", Duration::from_secs(600));
/// ```
///
/// [`check`](Self::check) and the first use of the schedule report its faults.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub(super) name: Key,
    pub(super) timing: Timing,
    /// That of a cron pattern; of other times, UTC.
    pub(super) zone: Zone,
    /// The times as the row keeps them, without the shift and the zone.
    pub(super) text: String,
    /// How much later than its times each tick comes.
    pub(super) shift: TimeDelta,
    pub(super) description: String,
    pub(super) catch_up: CatchUp,
    pub(super) grace: TimeDelta,
    pub(super) retries: Retries,
    pub(super) timeout: Option<Duration>,
    pub(super) lease: Option<TimeDelta>,
    pub(super) group: Option<Key>,
    pub(super) renamed_from: Vec<Key>,
    pub(super) exclusive: Option<Key>,
    pub(super) faults: Faults,
}

impl Schedule {
    /// Creates a schedule with a tick at each time that matches a cron pattern, in UTC unless
    /// [`zone`](Self::zone) sets another time zone.
    ///
    /// The pattern has five fields (minute, hour, day of the month, month, day of the week), or six
    /// with seconds in front, and is read as Debian's cron reads it. Or it is `@yearly`,
    /// `@annually`, `@monthly`, `@weekly`, `@daily`, `@midnight` or `@hourly`. At a change of the
    /// clock, a pattern that names hours has one tick for a repeated hour, at its first occurrence,
    /// and a tick at the end of a gap that contains its time. A pattern that matches every hour
    /// follows elapsed time instead. A pattern that crons read in different ways, or that no time
    /// matches, is not possible.
    pub fn cron(name: &str, pattern: &str) -> Self {
        let text = pattern.split_whitespace().collect::<Vec<_>>().join(" ");
        let parsed = match text.len() {
            0..=PATTERN => Pattern::parse(&text),
            _ => Err(format!("it has more than {PATTERN} bytes")),
        };
        let fault = parsed.as_ref().err().map(|wrong| {
            let pattern = text.chars().take(80).collect::<String>();
            Invalid::new(format!("the cron pattern {pattern:?}: {wrong}"))
        });
        let timing = Timing::Cron { pattern: parsed.ok().map(Box::new) };
        Self::new(name, timing, format!("cron {text}"), fault)
    }

    /// Creates a schedule with a tick at each multiple of `period` since 1970, so that all
    /// instances agree on the ticks: 100 ms to 366 days.
    pub fn every(name: &str, period: Duration) -> Self {
        let (micros, fault) = whole("a period", period);
        Self::new(name, Timing::Every(micros), format!("every {period:?}"), fault)
    }

    /// Creates a schedule whose first tick is at its registration, and each other one `delay` after
    /// the end of the run before, on whichever instance that was: 100 ms to 366 days.
    pub fn after(name: &str, delay: Duration) -> Self {
        let (micros, fault) = whole("a delay", delay);
        Self::new(name, Timing::After(micros), format!("{AFTER}{delay:?}"), fault)
    }

    fn new(name: &str, timing: Timing, text: String, fault: Option<Invalid>) -> Self {
        let mut faults = Faults::default();
        let name = Key::checked(name, &mut faults);
        fault.into_iter().for_each(|fault| faults.add(fault));
        Self {
            name,
            timing,
            zone: Zone::UTC,
            text,
            shift: TimeDelta::zero(),
            description: String::new(),
            catch_up: CatchUp::default(),
            grace: TimeDelta::minutes(5),
            retries: Retries::default(),
            timeout: None,
            lease: None,
            group: None,
            renamed_from: Vec::new(),
            exclusive: None,
            faults,
        }
    }

    /// Sets the time zone in which a cron pattern is read, by its name in the tz database.
    ///
    /// The database is part of the library ([`zones_release`](Self::zones_release)); that of the
    /// machine is not used. The name may be in upper or lower case. A schedule without a cron
    /// pattern has no time zone.
    pub fn zone(mut self, name: &str) -> Self {
        match (&self.timing, Zone::named(name)) {
            (Timing::Cron { .. }, Some(zone)) => self.zone = zone,
            (Timing::Cron { .. }, None) => {
                let name = name.chars().take(80).collect::<String>();
                self.faults
                    .add(Invalid::new(format!("{name:?} is no time zone: write one like Europe/Berlin, or UTC")));
            }
            _ => self.faults.add(Invalid::new("only a cron pattern has a time zone")),
        }
        self
    }

    /// Delays each tick by a part of `most`, so that schedules with the same times do not all begin
    /// at once. The name of the schedule decides the part: it is the same on all instances and for
    /// all ticks, in whole seconds. The time of a tick, as in [`upcoming`](Self::upcoming) and in
    /// the history, is the later one.
    ///
    /// A jitter is from 1 s to a day. A schedule with a fixed delay has none, because its ticks
    /// follow its runs. Instances of a version before this method do not run the schedule.
    ///
    /// # Examples
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// use chrono::{DateTime, TimeDelta, Utc};
    /// use rowlock::Schedule;
    ///
    /// let report = Schedule::cron("report", "30 2 * * *").jitter(Duration::from_secs(600));
    /// let half_past: DateTime<Utc> = "2026-10-24T02:30:00Z".parse()?;
    /// let tick = report.upcoming(half_past - TimeDelta::hours(1))?.next().expect("a tick a day");
    /// assert!(tick - half_past <= TimeDelta::minutes(10));
    /// # Ok(())
    /// # }
    /// ```
    pub fn jitter(mut self, most: Duration) -> Self {
        let checked = within("a jitter", most, Duration::from_secs(1), DAY, "it has to be from 1 s to a day");
        let checked = match self.timing {
            Timing::After(_) => Err(Invalid::new("a fixed delay has no jitter: its ticks follow its runs")),
            _ => checked,
        };
        if self.faults.accept(checked).is_none() {
            return self;
        }
        let part = hash(&["jitter", self.name.as_str()]) % (most.as_secs() + 1);
        self.shift = TimeDelta::from_std(Duration::from_secs(part)).unwrap_or_default();
        self
    }

    /// Sets a description for operators, such as the purpose of the schedule and whom to ask. It is
    /// shown while a living instance declares the schedule. At most 1,000 characters are kept.
    #[must_use]
    pub fn description(mut self, text: &str) -> Self {
        let shown = text.chars().filter(|c| !c.is_control() || ['\n', '\t'].contains(c));
        self.description = shown.take(DESCRIPTION).collect();
        self
    }

    /// Sets what happens with ticks that nothing ran at their time: [`CatchUp::Once`] by default.
    pub fn catch_up(mut self, catch_up: CatchUp) -> Self {
        if let CatchUp::All(most @ (0 | 1_001..)) = catch_up {
            let setting = "a number of ticks to catch up on";
            self.faults.add(Invalid::setting(setting, most, "it has to be from 1 to 1,000"));
        }
        self.catch_up = catch_up;
        self
    }

    /// Sets how late a run may start and still count as on time: five minutes by default. With
    /// [`CatchUp::Skip`], a tick that is older is skipped. One that is up to a second old is
    /// run, whatever the grace: a poll comes a little later than its tick. At most 366 days.
    pub fn grace(mut self, grace: Duration) -> Self {
        let checked = within("a grace", grace, Duration::ZERO, YEAR, "it has to be at most 366 days");
        self.grace = self.faults.accept(checked).unwrap_or(self.grace);
        self
    }

    /// Sets how often, and after which [`Backoff`], a tick whose run failed is run again: never by
    /// default, and at most 1,000 times.
    ///
    /// A run whose process died, or that was handed back, counts as a retry. Such a run is always
    /// taken over. A tick that kills its processes ends as failed after its first attempt, its
    /// retries and ten further attempts.
    pub fn retry(mut self, times: u32, backoff: impl Into<Backoff>) -> Self {
        self.retries = self.faults.accept(Retries::new(times, backoff.into())).unwrap_or_default();
        self
    }

    /// Sets the longest that a run may take: without a limit by default.
    ///
    /// The work is then dropped, and the tick's [cancellation
    /// token](crate::Tick::cancellation_token) is cancelled, for its tasks. The run counts as
    /// failed, so it is [retried](Self::retry) as after an error. Work that blocks its thread
    /// cannot be dropped. If it succeeds within five more seconds, the run has succeeded. After
    /// that the lease is no longer renewed, and once it has ended another instance runs the tick
    /// beside such work. The wait for a key ([`exclusive_with`](Self::exclusive_with)) does not
    /// count. A limit is from 1 ms to 366 days.
    pub fn timeout(mut self, limit: Duration) -> Self {
        let rule = "it has to be from 1 ms to 366 days";
        let checked = within("a timeout", limit, Duration::from_millis(1), YEAR, rule);
        self.timeout = self.faults.accept(checked).map(|_| limit);
        self
    }

    /// Sets the lease of the runs of this schedule, in place of that of all
    /// [`Schedules`](crate::Schedules::lease): 100 ms to 30 days.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = self.faults.accept(lease_of_runs(lease));
        self
    }

    /// Puts the schedule into a group, of which an instance runs at most so many ticks at the same
    /// time as [`Schedules::max_concurrent_runs_in`](crate::Schedules::max_concurrent_runs_in)
    /// sets.
    pub fn group(mut self, name: &str) -> Self {
        self.group = Some(Key::checked(name, &mut self.faults));
        self
    }

    /// Declares that the schedule had another name before. It may have had several.
    ///
    /// It takes the place of the schedule of that name, with its next tick, the attempts at one
    /// that was begun, its pause and its trigger: what is due there is run here, once. That one is
    /// [removed](crate::Schedules::removed) then. While older instances that have it are alive,
    /// this happens as other times take effect, after a few beats and between two runs, and until
    /// then no instance that has this declaration runs the schedule under its new name. The history
    /// keeps the runs under the name that they had.
    ///
    /// A rollback needs nothing: instances with the old name take the place back in the same way,
    /// once no instance with the new one is alive. So the declaration stays until no instance with
    /// the old name can start. If the new name was in use before the declaration came, and ran
    /// later than the old one, it goes on with what it has. Both names have at most 200 bytes.
    pub fn renamed_from(mut self, name: &str) -> Self {
        let old = Key::checked(name, &mut self.faults);
        if old == self.name {
            self.faults.add(Invalid::new("it has this name already"));
        }
        if self.name().len().max(old.as_str().len()) > PATTERN {
            let wrong = "both names of a schedule that gets another one have at most 200 bytes";
            self.faults.add(Invalid::new(wrong));
        }
        self.renamed_from.push(old);
        self
    }

    /// Makes each run hold a key of the table `t_resource_lock` as well, so that the schedule and
    /// other programs that take the key exclude each other.
    ///
    /// A run that is due waits until the key is free, and its work begins with both. If either the
    /// tick or the key is lost, the work is dropped, and the tick is run again. The run releases
    /// the key with its own status. If its process dies, the instance that takes over waits for the
    /// end of both leases. A run that waits counts as one of the
    /// [concurrent runs](crate::Schedules::max_concurrent_runs).
    ///
    /// The key is taken for the [lease](Self::lease) of the run and under the label of the
    /// instance, unless [`Schedules::lock`](crate::Schedules::lock) sets other terms.
    ///
    /// # Examples
    /// ```
    /// use rowlock::Schedule;
    ///
    /// // The older service takes the key "billing" of the same table.
    /// let billing = Schedule::cron("billing", "0 4 * * *").exclusive_with("billing");
    /// ```
    pub fn exclusive_with(mut self, key: &str) -> Self {
        self.exclusive = Some(Key::checked(key, &mut self.faults));
        self
    }

    /// Checks the schedule. Nothing is sent. [`Schedules::start`](crate::Schedules::start) checks
    /// it too.
    ///
    /// # Errors
    /// [`Invalid`] with all faults of the schedule, and what to write instead.
    pub fn check(&self) -> Result<(), Invalid> {
        self.faults.check()
    }

    /// Returns the schedule's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }
}

/// Validates the lease of runs.
pub(super) fn lease_of_runs(lease: Duration) -> Result<TimeDelta, Invalid> {
    within("a lease", lease, Duration::from_millis(100), 30 * DAY, "it has to be from 100 ms to 30 days")
}

/// Returns a period, which has whole milliseconds: no database's clock has less. A period that is
/// not possible is a year.
fn whole(setting: &str, value: Duration) -> (TimeDelta, Option<Invalid>) {
    let least = if value.subsec_nanos().is_multiple_of(1_000_000) { LEAST } else { Duration::MAX };
    match within(setting, value, least, YEAR, PERIODS) {
        Ok(period) => (period, None),
        Err(fault) => (TimeDelta::days(366), Some(fault)),
    }
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
