//! When a key may be taken: the rules table as a pure function.
//!
//! This is the one place where that is decided. PostgreSQL and MySQL repeat the granting half in
//! their claim statement, so that a grant costs one round trip; what they do not grant is explained
//! here from the row that they saw. A test puts every cell of the table through every server.

use chrono::{DateTime, TimeDelta, Utc};

use crate::key::{Holder, Key};

/// What to do with a row whose last run failed or never ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rules {
    /// A failed run may be repeated, an expired claim is taken over.
    #[default]
    Recover,
    /// Only a success lets the next one in; after a failure or a crash, an operator has to release the key.
    Article,
}

/// How work ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// Written as `S`.
    #[default]
    Succeeded,
    /// Written as `F`.
    Failed,
}

impl Status {
    /// The letter that stands in the column `status`.
    pub fn letter(self) -> &'static str {
        match self {
            Self::Succeeded => "S",
            Self::Failed => "F",
        }
    }
}

/// On what terms a lock asks for its keys.
#[derive(Clone, Debug)]
pub struct Terms {
    pub rules: Rules,
    pub min_interval: TimeDelta,
    pub lease: TimeDelta,
    pub retry_failed: bool,
    /// How far east of UTC the other programs on the table write their times; set only where there are any.
    pub article_clients: Option<TimeDelta>,
    pub label: String,
}

impl Terms {
    /// What the table's `begin_time` and `end_time` are ahead of UTC.
    pub fn offset(&self) -> TimeDelta {
        self.article_clients.unwrap_or_default()
    }

    /// The column `time` of a row that is created: `min_interval` in minutes, at least the article's 60.
    pub fn minutes(&self) -> i32 {
        let minutes = (self.min_interval + TimeDelta::microseconds(59_999_999)).num_minutes();
        i32::try_from(minutes).unwrap_or(i32::MAX).max(60)
    }
}

/// A row of `t_resource_lock`, its times in UTC.
#[derive(Clone, Debug)]
pub struct Row {
    pub locked: bool,
    pub status: String,
    pub begin_time: Option<DateTime<Utc>>,
    pub minutes: Option<i64>,
    pub client_ip: String,
    pub holder: Option<uuid::Uuid>,
    pub token: i64,
    pub expires_at: Option<DateTime<Utc>>,
    pub claimed_at: Option<DateTime<Utc>>,
    /// `end_time` is set: some program has ended what the row tells of.
    pub ended: bool,
    /// Somebody is told when the row is freed (PostgreSQL).
    pub awaited: bool,
}

impl Row {
    /// Locked by a claim of rowlock's that no other program has trampled on. One that unlocks the row and locks it
    /// again leaves its `end_time` behind, also where whole seconds make its `begin_time` the same as ours.
    pub fn is_rowlocks(&self) -> bool {
        let untouched = self.claimed_at.is_some() && self.claimed_at == self.begin_time && !self.ended;
        self.locked && self.holder.is_some() && untouched
    }
}

/// What the rules say about one row at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is no row: create it free, then ask again.
    Create,
    /// Free, and nothing stands in the way.
    Acquire,
    /// An earlier request of this very holder came through.
    Same,
    /// Expired, or another program's time is over.
    TakeOver,
    /// Not now; with the time from which on asking makes sense, where there is one.
    Refuse(Reason, Option<DateTime<Utc>>),
}

/// Why a key was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Another claim holds it, and its lease has not ended.
    Held,
    /// A program that does not know rowlock holds it.
    HeldByAnotherProgram,
    /// Its holder never ended it, and the lease is over; [`Rules::Article`] leaves that to an operator
    /// ([`LeaseLock::force_release`](crate::LeaseLock::force_release)).
    TimedOutUnfinished,
    /// It was taken less than `min_interval` ago.
    WithinWindow,
    /// Its last run failed; [`Rules::Article`] leaves that to an operator.
    LastRunFailed,
    /// Its status is not `S`; [`Rules::Article`] leaves that to an operator.
    NotSucceeded,
    /// Others wait for it in order ([`LeaseLock::fair`](crate::LeaseLock::fair)), and were there before. Only fair lock objects are told so.
    Queued,
    /// Somebody else's transaction was at the row all the while (on SQLite: at the file).
    Busy,
}

impl Reason {
    /// A short name for programs: it never changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::HeldByAnotherProgram => "held_by_another_program",
            Self::TimedOutUnfinished => "timed_out_unfinished",
            Self::WithinWindow => "within_window",
            Self::LastRunFailed => "last_run_failed",
            Self::NotSucceeded => "not_succeeded",
            Self::Queued => "queued",
            Self::Busy => "busy",
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Held => "held",
            Self::HeldByAnotherProgram => "held by another program",
            Self::TimedOutUnfinished => "timed out unfinished",
            Self::WithinWindow => "within its window",
            Self::LastRunFailed => "the last run failed",
            Self::NotSucceeded => "the last run did not succeed",
            Self::Queued => "others wait in line before it",
            Self::Busy => "busy",
        })
    }
}

/// The rules table: may `holder` have the key of this row now, on these terms?
pub fn judge(row: Option<&Row>, now: DateTime<Utc>, holder: Holder, terms: &Terms) -> Verdict {
    use Reason::*;
    use Verdict::*;
    let recover = terms.rules == Rules::Recover;
    let Some(row) = row else { return Create };

    if row.is_rowlocks() {
        return if row.holder == Some(*holder.as_uuid()) {
            Same
        } else if row.expires_at.is_none_or(|end| now < end) {
            Refuse(Held, row.expires_at)
        } else if recover {
            TakeOver
        } else {
            Refuse(TimedOutUnfinished, None)
        };
    }
    if row.locked {
        let end = match (recover, terms.article_clients, row.begin_time, row.minutes) {
            (true, Some(_), Some(begin), Some(minutes)) => {
                Some(later(begin, TimeDelta::try_minutes(minutes).unwrap_or(TimeDelta::MAX)))
            }
            _ => None,
        };
        return if end.is_some_and(|end| now >= end) { TakeOver } else { Refuse(HeldByAnotherProgram, end) };
    }
    if !recover && row.status != "S" {
        return Refuse(if row.status == "F" { LastRunFailed } else { NotSucceeded }, None);
    }
    // Without a window, a begin_time that lies ahead (rounded up by its column, or of a clock that was stepped back) is none either.
    let window = (!terms.min_interval.is_zero()).then_some(terms.min_interval);
    let window_ends = row.begin_time.zip(window).map(|(begin, window)| later(begin, window));
    if window_ends.is_none_or(|end| now >= end) || (row.status == "F" && terms.retry_failed) {
        Acquire
    } else {
        Refuse(WithinWindow, window_ends)
    }
}

/// What a row is at one moment, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// A claim holds it.
    Held,
    /// A claim holds it whose lease is over: its holder crashed, was stopped, or abandoned it.
    Expired,
    /// A program that does not know rowlock holds it.
    HeldByAnotherProgram,
    /// Free, but taken less than `min_interval` ago.
    WithinWindow,
    /// Free, and its last run failed.
    Failed,
    /// Free.
    Free,
}

impl State {
    /// A short name for programs: it never changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Expired => "expired",
            Self::HeldByAnotherProgram => "held_by_another_program",
            Self::WithinWindow => "within_window",
            Self::Failed => "failed",
            Self::Free => "free",
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Held => "held",
            Self::Expired => "expired",
            Self::HeldByAnotherProgram => "held by another program",
            Self::WithinWindow => "within its window",
            Self::Failed => "failed",
            Self::Free => "free",
        })
    }
}

/// A row's state, and until when it lasts, where that is known.
pub fn state(row: &Row, now: DateTime<Utc>, terms: &Terms) -> (State, Option<DateTime<Utc>>) {
    if row.is_rowlocks() {
        let expired = row.expires_at.is_some_and(|end| now >= end);
        return (if expired { State::Expired } else { State::Held }, row.expires_at);
    }
    if row.locked {
        return (State::HeldByAnotherProgram, None);
    }
    let window_ends = row.begin_time.map(|begin| later(begin, terms.min_interval)).filter(|end| now < *end);
    match window_ends {
        _ if row.status == "F" => (State::Failed, window_ends),
        Some(end) => (State::WithinWindow, Some(end)),
        None => (State::Free, None),
    }
}

/// `from + distance`, or the end of time: rows of other programs may hold any time at all.
fn later(from: DateTime<Utc>, distance: TimeDelta) -> DateTime<Utc> {
    from.checked_add_signed(distance).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

/// An ordinary answer: somebody or something stands in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The key asked for.
    pub key: Key,
    /// What stands in the way.
    pub reason: Reason,
    /// Who took the key last: the column `client_ip`.
    pub by: String,
    /// When that one took it, on the database's clock.
    pub since: Option<DateTime<Utc>>,
    /// When the lease or the window ends, on the database's clock; `None` where an operator has to act.
    pub until: Option<DateTime<Utc>>,
    /// How long from now until asking again makes sense; a holder may end sooner, or renew.
    pub retry_after: Option<std::time::Duration>,
    /// Whoever frees the row will tell.
    pub(crate) awaited: bool,
}

impl Refusal {
    /// The refusal that a row gives cause to.
    pub(crate) fn new(key: Key, reason: Reason, until: Option<DateTime<Utc>>, row: &Row, now: DateTime<Utc>) -> Self {
        let retry_after = until.map(|until| (until - now).to_std().unwrap_or_default());
        let (by, since, awaited) = (row.client_ip.clone(), row.begin_time, row.awaited);
        Self { key, reason, by, since, until, retry_after, awaited }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.key, self.reason)?;
        if !self.by.is_empty() {
            write!(f, ", by {}", self.by)?;
        }
        if let Some(since) = self.since {
            write!(f, ", since {}", since.format("%Y-%m-%d %H:%M:%S UTC"))?;
        }
        if let Some(until) = self.until {
            write!(f, ", until {}", until.format("%Y-%m-%d %H:%M:%S UTC"))?;
        }
        Ok(())
    }
}
