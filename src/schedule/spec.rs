//! What a schedule is: its times, and its terms.

use std::time::Duration;

use chrono::{DateTime, FixedOffset, Offset as _, SubsecRound, TimeDelta, Utc};

use crate::{
    error::Error,
    key::Key,
    retry::{DAY, within},
    schedule::{
        cron::Pattern,
        hash::hash,
        terms::{CatchUp, Retries, YEAR},
        zones::{RELEASE, Zone},
    },
    store::schedule::Times,
};

const LEAST: Duration = Duration::from_millis(100);
const PERIODS: &str = "it has to be from 100 ms to 366 days, in whole milliseconds";
/// How the text of a fixed delay begins.
pub(super) const AFTER: &str = "after ";
/// What stands between times and how much later the ticks come.
const SHIFTED: &str = " +";
/// The most characters of a description.
const DESCRIPTION: usize = 1_000;
/// The longest text of a pattern.
const PATTERN: usize = 200;

/// The slot of a schedule whose pattern has no further time: the end of what all databases hold.
pub(super) const NEVER: DateTime<Utc> = match DateTime::from_timestamp(253_370_764_800, 0) {
    Some(year_9999) => year_9999,
    None => DateTime::UNIX_EPOCH,
};

#[derive(Clone, Debug)]
pub(super) enum Timing {
    Cron { pattern: Box<Pattern>, zone: Zone },
    Every(TimeDelta),
    After(TimeDelta),
}

/// A schedule: a name, the times of its ticks, and what happens with ticks that are late or fail.
///
/// All instances that know the schedule share its row in the table `t_resource_schedule`.
///
/// ```
/// # fn main() -> Result<(), rowlock::Error> {
/// use std::time::Duration;
/// use rowlock::{CatchUp, Retries, Schedule};
///
/// let report = Schedule::cron("nightly-report", "30 2 * * *")?
///     .zone("Europe/Berlin")?
///     .catch_up(CatchUp::Skip)?
///     .grace(Duration::from_secs(5 * 60))?
///     .retry(Retries::times(3).backoff(Duration::from_secs(10), Duration::from_secs(600))?)?;
/// let refresh = Schedule::every("refresh", Duration::from_secs(30))?;
/// let sweep = Schedule::after("sweep", Duration::from_secs(600))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    pub(super) name: Key,
    pub(super) timing: Timing,
    /// The times as the row keeps them.
    text: String,
    /// How much later than its times each tick comes.
    shift: TimeDelta,
    pub(super) description: String,
    pub(super) catch_up: CatchUp,
    pub(super) grace: TimeDelta,
    pub(super) retries: Retries,
    pub(super) timeout: Option<Duration>,
    pub(super) lease: Option<TimeDelta>,
    pub(super) group: Option<Key>,
    pub(super) renamed_from: Vec<Key>,
    pub(super) exclusive: Option<Key>,
}

impl Schedule {
    /// Creates a schedule with a tick at each time that matches a cron pattern, in UTC unless
    /// [`zone`](Self::zone) sets another time zone.
    ///
    /// The pattern has five fields (minute, hour, day of the month, month, day of the week), or six
    /// with seconds in front, and is read as Debian's cron reads it. Or it is `@yearly`,
    /// `@annually`, `@monthly`, `@weekly`, `@daily`, `@midnight` or `@hourly`. Where the clock is
    /// changed, a pattern that names hours has one tick in a repeated hour, the first, and a tick
    /// at the end of a gap that left its time out. A pattern that matches every hour follows
    /// elapsed time instead.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a name, [`Error::InvalidSchedule`] for one that
    /// is not a pattern, that crons read in different ways, or that no time matches. The message
    /// says what to write instead.
    pub fn cron(name: &str, pattern: &str) -> Result<Self, Error> {
        let name = Key::new(name)?;
        let text = pattern.split_whitespace().collect::<Vec<_>>().join(" ");
        let wrong = |wrong: String| {
            let pattern = text.chars().take(80).collect::<String>();
            Error::InvalidSchedule { name: name.clone(), wrong: format!("the cron pattern {pattern:?}: {wrong}") }
        };
        if text.len() > PATTERN {
            return Err(wrong(format!("it has more than {PATTERN} bytes")));
        }
        let pattern = Pattern::parse(&text).map_err(wrong)?;
        Ok(Self::new(name, Timing::Cron { pattern: Box::new(pattern), zone: Zone::UTC }, format!("cron {text}")))
    }

    /// Creates a schedule with a tick at each multiple of `period` since 1970, so that all
    /// instances agree on the ticks.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a name, [`Error::InvalidSetting`] for a period
    /// outside of 100 ms to 366 days.
    pub fn every(name: &str, period: Duration) -> Result<Self, Error> {
        let name = Key::new(name)?;
        let micros = whole("a period", period)?;
        Ok(Self::new(name, Timing::Every(micros), format!("every {period:?}")))
    }

    /// Creates a schedule whose first tick is at its registration, and each other one `delay` after
    /// the end of the run before, on whichever instance that was.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a name, [`Error::InvalidSetting`] for a delay
    /// outside of 100 ms to 366 days.
    pub fn after(name: &str, delay: Duration) -> Result<Self, Error> {
        let name = Key::new(name)?;
        let micros = whole("a delay", delay)?;
        Ok(Self::new(name, Timing::After(micros), format!("{AFTER}{delay:?}")))
    }

    /// Returns the schedule that has these times. `None` if they are of another version, or
    /// removed.
    pub(super) fn of(times: &Times) -> Option<Self> {
        let (spec, shift) = match times.spec.rsplit_once(SHIFTED) {
            Some((spec, shift)) => (spec, duration(shift)?),
            None => (times.spec.as_str(), Duration::ZERO),
        };
        let (kind, rest) = spec.split_once(' ')?;
        let name = times.name.as_str();
        let schedule = match kind {
            "cron" => Self::cron(name, rest).ok()?.zone(&times.zone).ok()?,
            "every" => Self::every(name, duration(rest)?).ok()?,
            "after" => Self::after(name, duration(rest)?).ok()?,
            _ => return None,
        };
        Some(schedule.shifted(shift))
    }

    fn new(name: Key, timing: Timing, text: String) -> Self {
        let grace = TimeDelta::minutes(5);
        let (catch_up, retries) = (CatchUp::default(), Retries::times(0));
        Self {
            name,
            timing,
            text,
            shift: TimeDelta::zero(),
            description: String::new(),
            catch_up,
            grace,
            retries,
            timeout: None,
            lease: None,
            group: None,
            renamed_from: Vec::new(),
            exclusive: None,
        }
    }

    /// Sets the time zone in which a cron pattern is read, by its name in the tz database.
    ///
    /// The database is part of the library ([`zones_release`](Self::zones_release)); that of the
    /// machine is not used. The name may be in upper or lower case.
    ///
    /// # Errors
    /// [`Error::InvalidSchedule`] for an unknown zone, or a schedule without a cron pattern.
    pub fn zone(mut self, name: &str) -> Result<Self, Error> {
        let wrong = |wrong: String| Error::InvalidSchedule { name: self.name.clone(), wrong };
        let Timing::Cron { zone, .. } = &mut self.timing else {
            return Err(wrong("only a cron pattern has a time zone".to_owned()));
        };
        let Some(named) = Zone::named(name) else {
            let name = name.chars().take(80).collect::<String>();
            return Err(wrong(format!("{name:?} is no time zone: write one like Europe/Berlin, or UTC")));
        };
        *zone = named;
        Ok(self)
    }

    /// Has each tick come later by a part of `most`, so that schedules with the same times do not
    /// all begin at once. The name of the schedule decides the part: it is the same on all instances
    /// and for all ticks, in whole seconds. The time of a tick, as in [`upcoming`](Self::upcoming)
    /// and in the history, is the later one.
    ///
    /// Instances of a version before this method do not run the schedule.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a jitter outside of 1 s to a day; [`Error::InvalidSchedule`]
    /// for a schedule with a fixed delay, whose ticks follow its runs.
    ///
    /// # Examples
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// use chrono::{DateTime, TimeDelta, Utc};
    /// use rowlock::Schedule;
    ///
    /// let report = Schedule::cron("report", "30 2 * * *")?.jitter(Duration::from_secs(600))?;
    /// let half_past: DateTime<Utc> = "2026-10-24T02:30:00Z".parse()?;
    /// let tick = report.upcoming(half_past - TimeDelta::hours(1)).next().expect("it has a tick each day");
    /// assert!(tick - half_past <= TimeDelta::minutes(10));
    /// # Ok(())
    /// # }
    /// ```
    pub fn jitter(self, most: Duration) -> Result<Self, Error> {
        within("a jitter", most, Duration::from_secs(1), DAY, "it has to be from 1 s to a day")?;
        if matches!(self.timing, Timing::After(_)) {
            let wrong = "a fixed delay has no jitter: its ticks follow its runs".to_owned();
            return Err(Error::InvalidSchedule { name: self.name, wrong });
        }
        let part = hash(&["jitter", self.name.as_str()]) % (most.as_secs() + 1);
        Ok(self.shifted(Duration::from_secs(part)))
    }

    /// Returns by how much later each tick comes than the same tick of another schedule. `None` if
    /// they differ in more than that.
    pub(super) fn later_than(&self, other: &Self) -> Option<TimeDelta> {
        let plain = |schedule: &Self| schedule.text.split(SHIFTED).next().map(str::to_owned);
        let same = plain(self) == plain(other) && self.zone_name() == other.zone_name();
        same.then(|| self.shift - other.shift)
    }

    fn shifted(mut self, shift: Duration) -> Self {
        let plain = self.text.split(SHIFTED).next().unwrap_or_default();
        self.text = if shift.is_zero() { plain.to_owned() } else { format!("{plain}{SHIFTED}{shift:?}") };
        self.shift = TimeDelta::from_std(shift).unwrap_or_default();
        self
    }

    /// Sets a text for operators, which they see beside the schedule while an instance that is
    /// alive declares it: what it is for, and whom to ask. At most 1,000 characters are kept.
    #[must_use]
    pub fn description(mut self, text: &str) -> Self {
        let shown = text.chars().filter(|c| !c.is_control() || ['\n', '\t'].contains(c));
        self.description = shown.take(DESCRIPTION).collect();
        self
    }

    /// Sets what happens with ticks that nothing ran at their time: [`CatchUp::Once`] by default.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for [`CatchUp::All`] with a number outside of 1 to 1,000.
    pub fn catch_up(mut self, catch_up: CatchUp) -> Result<Self, Error> {
        if let CatchUp::All(most @ (0 | 1_001..)) = catch_up {
            let (setting, value) = ("a number of ticks to catch up on", most.to_string());
            return Err(Error::InvalidSetting { setting, value, rule: "it has to be from 1 to 1,000" });
        }
        self.catch_up = catch_up;
        Ok(self)
    }

    /// Sets how late a run may start and still count as on time: five minutes by default. With
    /// [`CatchUp::Skip`], a tick that is older is passed over. One that is up to a second old is
    /// run, whatever the grace: a poll comes a little later than its tick.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for more than 366 days.
    pub fn grace(mut self, grace: Duration) -> Result<Self, Error> {
        self.grace = within("a grace", grace, Duration::ZERO, YEAR, "it has to be at most 366 days")?;
        Ok(self)
    }

    /// Sets how often a tick whose run failed is run again: never by default.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for more than 1,000 times.
    pub fn retry(mut self, retries: Retries) -> Result<Self, Error> {
        if retries.times > 1_000 {
            let (setting, value) = ("a number of retries", retries.times.to_string());
            return Err(Error::InvalidSetting { setting, value, rule: "it has to be at most 1,000" });
        }
        self.retries = retries;
        Ok(self)
    }

    /// Sets the longest that a run may take: without a limit by default.
    ///
    /// The work is then dropped, and the tick's [cancellation
    /// token](crate::Tick::cancellation_token) is cancelled, for its tasks. The run counts as
    /// failed, so it is [retried](Self::retry) as after an error. Work that blocks its thread
    /// cannot be dropped. If it succeeds within five more seconds, the run has succeeded. After
    /// that the lease is no longer renewed, and once it has ended another instance runs the tick
    /// beside such work. The wait for a key ([`exclusive_with`](Self::exclusive_with)) does not
    /// count.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a duration outside of 1 ms to 366 days.
    pub fn timeout(mut self, limit: Duration) -> Result<Self, Error> {
        within("a timeout", limit, Duration::from_millis(1), YEAR, "it has to be from 1 ms to 366 days")?;
        self.timeout = Some(limit);
        Ok(self)
    }

    /// Sets the lease of the runs of this schedule, in place of that of all
    /// [`Schedules`](crate::Schedules::lease).
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a duration outside of 100 ms to 30 days.
    pub fn lease(mut self, lease: Duration) -> Result<Self, Error> {
        self.lease = Some(lease_of_runs(lease)?);
        Ok(self)
    }

    /// Puts the schedule into a group, of which an instance runs at most so many ticks at the same
    /// time as [`Schedules::max_runs`](crate::Schedules::max_runs) sets.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a name.
    pub fn group(mut self, name: &str) -> Result<Self, Error> {
        self.group = Some(Key::new(name)?);
        Ok(self)
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
    /// later than the old one, it goes on with what it has.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a name; [`Error::InvalidSchedule`] for the name
    /// of the schedule itself, and for a name of more than 200 bytes.
    pub fn renamed_from(mut self, name: &str) -> Result<Self, Error> {
        let old = Key::new(name)?;
        let wrong = |wrong: &str| Err(Error::InvalidSchedule { name: self.name.clone(), wrong: wrong.to_owned() });
        if old == self.name {
            return wrong("it has this name already");
        }
        if self.name().len().max(old.as_str().len()) > PATTERN {
            return wrong("both names of a schedule that gets another one have at most 200 bytes");
        }
        self.renamed_from.push(old);
        Ok(self)
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
    /// # Errors
    /// [`Error::InvalidKey`] for a text that is not a key.
    ///
    /// # Examples
    /// ```
    /// # fn main() -> Result<(), rowlock::Error> {
    /// use rowlock::Schedule;
    ///
    /// // The older service takes the key "billing" of the same table.
    /// let billing = Schedule::cron("billing", "0 4 * * *")?.exclusive_with("billing")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn exclusive_with(mut self, key: &str) -> Result<Self, Error> {
        self.exclusive = Some(Key::new(key)?);
        Ok(self)
    }

    /// Returns the schedule's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the times as the row keeps them, without the zone.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the ticks that come after `after`, without end: an iterator.
    ///
    /// It reads no database, and knows no tick that was moved or triggered. A schedule with a fixed
    /// delay has no ticks ahead of time, since each follows the end of a run: the iterator is
    /// empty.
    ///
    /// # Examples
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use chrono::{DateTime, Utc};
    /// use rowlock::Schedule;
    ///
    /// let report = Schedule::cron("report", "30 2 * * *")?.zone("Europe/Berlin")?;
    /// let after: DateTime<Utc> = "2026-10-24T12:00:00Z".parse()?;
    /// let ticks: Vec<String> = report.upcoming(after).take(2).map(|tick| tick.to_rfc3339()).collect();
    /// assert_eq!(ticks, ["2026-10-25T00:30:00+00:00", "2026-10-26T01:30:00+00:00"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn upcoming(&self, after: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> + '_ {
        let is_ahead = |tick: &DateTime<Utc>| *tick < NEVER && !matches!(self.timing, Timing::After(_));
        let next = move |tick: DateTime<Utc>| Some(self.next(tick)).filter(is_ahead);
        std::iter::successors(next(after), move |tick| next(*tick))
    }

    /// Returns what the clocks in the schedule's time zone show at an instant.
    pub fn in_zone(&self, at: DateTime<Utc>) -> DateTime<FixedOffset> {
        let offset = match &self.timing {
            Timing::Cron { zone, .. } => zone.offset(at),
            Timing::Every(_) | Timing::After(_) => TimeDelta::zero(),
        };
        let east = i32::try_from(offset.num_seconds()).ok().and_then(FixedOffset::east_opt);
        at.with_timezone(&east.unwrap_or(Utc.fix()))
    }

    /// Returns the release of the tz database that the time zones come from, such as `2026f`.
    ///
    /// The database is compiled into the program, so that all instances of one build agree on the
    /// ticks.
    pub fn zones_release() -> &'static str {
        RELEASE
    }

    /// Returns the name of the time zone.
    pub(crate) fn zone_name(&self) -> &str {
        match &self.timing {
            Timing::Cron { zone, .. } => zone.name(),
            Timing::Every(_) | Timing::After(_) => "UTC",
        }
    }

    /// Returns the first slot of a schedule that is registered at `now`.
    pub(crate) fn first(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        match self.timing {
            Timing::After(_) => now.trunc_subsecs(3),
            _ => self.next(now),
        }
    }

    /// Returns the first slot after `after`, which is strictly later. For a fixed delay, `after` is
    /// the end of a run.
    pub(crate) fn next(&self, after: DateTime<Utc>) -> DateTime<Utc> {
        match self.next_unshifted(after.checked_sub_signed(self.shift).unwrap_or(after)) {
            slot if slot < NEVER => slot + self.shift,
            never => never,
        }
    }

    fn next_unshifted(&self, after: DateTime<Utc>) -> DateTime<Utc> {
        match &self.timing {
            Timing::Cron { pattern, zone } => zone.next(pattern, after).unwrap_or(NEVER).min(NEVER),
            Timing::Every(period) => {
                let period = period.num_milliseconds();
                let slot = (after.timestamp_millis().div_euclid(period) + 1) * period;
                DateTime::from_timestamp_millis(slot).unwrap_or(NEVER)
            }
            Timing::After(delay) => after.trunc_subsecs(3) + *delay,
        }
    }
}

/// Reads a period as a row keeps it: `30s`, `1.5s`, `100ms`.
fn duration(text: &str) -> Option<Duration> {
    if let Some(millis) = text.strip_suffix("ms") {
        return Some(Duration::from_millis(millis.parse().ok()?));
    }
    let (whole, part) = text.strip_suffix('s').map(|text| text.split_once('.').unwrap_or((text, "0")))?;
    let millis: u64 = format!("{part:0<3}").parse().ok()?;
    Duration::from_secs(whole.parse().ok()?).checked_add(Duration::from_millis(millis))
}

/// Validates the lease of runs.
pub(super) fn lease_of_runs(lease: Duration) -> Result<TimeDelta, Error> {
    within("a lease", lease, Duration::from_millis(100), 30 * DAY, "it has to be from 100 ms to 30 days")
}

/// Validates a period, which has whole milliseconds: no database's clock has less.
fn whole(setting: &'static str, value: Duration) -> Result<TimeDelta, Error> {
    let least = if value.subsec_nanos().is_multiple_of(1_000_000) { LEAST } else { Duration::MAX };
    within(setting, value, least, YEAR, PERIODS)
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
