//! When a key may be claimed: the rules table as a pure function.
//!
//! The functions here are the reference. The claim statements of PostgreSQL, MySQL and MariaDB
//! repeat the granting half, so that a grant costs one round trip. A claim that they do not grant
//! is explained here, from the row that they read. The functions in SQL have both halves, and the
//! Python client has them for SQLite. A test runs every cell of the table on every server, through
//! the functions and here, and writes the cells that the Python client is tested with.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use crate::key::{Holder, Key};

/// How to treat a row whose last run failed or never ended.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::{Reason, Rules};
///
/// let article = lock.rules(Rules::Article);
/// let lease = article.try_acquire("report").await?.acquired().expect("the key is free");
/// lease.fail().await?;
///
/// let refusal = article.try_acquire("report").await?.refused().expect("the last run failed");
/// assert_eq!(refusal.reason, Reason::LastRunFailed);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Rules {
    /// A failed run may be repeated, and an expired claim is taken over.
    #[default]
    Recover,
    /// Only a success permits the next claim. After a failure or a crash, an operator has to
    /// release the key.
    Article,
}

/// The result of the work.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::Status;
///
/// let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
/// lease.fail().await?;
/// let row = lock.inspect("report").await?.expect("the key has a row");
/// assert_eq!(row.status, Status::Failed.letter());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Status {
    /// Written as `S`.
    #[default]
    Succeeded,
    /// Written as `F`.
    Failed,
}

impl Status {
    /// Returns the letter stored in the column `status`.
    pub fn letter(self) -> &'static str {
        match self {
            Self::Succeeded => "S",
            Self::Failed => "F",
        }
    }
}

/// The terms on which a handle claims its keys and holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub rules: Rules,
    pub min_interval: TimeDelta,
    /// The lease of the row, of which `lock_delay` is a part that the holder does not trust.
    pub lease: TimeDelta,
    /// How long a key stays closed after a holder that has not ended its claim had to stop.
    pub lock_delay: TimeDelta,
    /// How long a key is held at most.
    pub max_hold: Duration,
    /// Keys are granted first come, first served, also across processes.
    pub fair: bool,
    pub retry_failed: bool,
    /// How far east of UTC the other programs on the table write their times. Set only if there are
    /// any.
    pub article_clients: Option<TimeDelta>,
    pub label: String,
}

/// Those of a handle without settings.
impl Default for Terms {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            min_interval: TimeDelta::zero(),
            lease: TimeDelta::seconds(30),
            lock_delay: TimeDelta::zero(),
            max_hold: Duration::MAX,
            fair: false,
            retry_failed: false,
            article_clients: None,
            label: String::new(),
        }
    }
}

impl Terms {
    /// Returns how far the table's `begin_time` and `end_time` are ahead of UTC.
    pub fn offset(&self) -> TimeDelta {
        self.article_clients.unwrap_or_default()
    }

    /// Returns the column `time` of a row that is created: `min_interval` in minutes, rounded up,
    /// and at least the article's 60.
    pub fn minutes(&self) -> i32 {
        let minutes = (self.min_interval + TimeDelta::microseconds(59_999_999)).num_minutes();
        i32::try_from(minutes).unwrap_or(i32::MAX).max(60)
    }
}

/// A row of `t_resource_lock`. Its times are in UTC.
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
    /// `end_time` is set: a program has ended the run that the row describes.
    pub ended: bool,
    /// A notification is sent when the row is freed (PostgreSQL).
    pub awaited: bool,
}

impl Row {
    /// Returns whether the row is locked by a claim of rowlock that no other program has
    /// overwritten. A program that unlocks the row and locks it again leaves its `end_time` behind,
    /// which also shows where whole seconds make its `begin_time` equal to that of the claim.
    pub fn is_rowlocks(&self) -> bool {
        let untouched = self.claimed_at.is_some() && self.claimed_at == self.begin_time && !self.ended;
        self.locked && self.holder.is_some() && untouched
    }
}

/// What the rules decide about one row at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The row does not exist. It is created free, and the claim request is repeated.
    Create,
    /// The row is free, and nothing prevents the claim.
    Acquire,
    /// An earlier request of the same holder was carried out.
    Same,
    /// The claim has expired, or the time of another program is over.
    TakeOver,
    /// The claim is refused, with the time from which a new request is useful, if there is one.
    Refuse(Reason, Option<DateTime<Utc>>),
}

/// Why a key was refused.
///
/// ```
/// use rowlock::Reason;
///
/// /// Returns whether an operator has to act before the key is granted again.
/// fn needs_operator(reason: Reason) -> bool {
///     use Reason::*;
///     matches!(reason, TimedOutUnfinished | LastRunFailed | NotSucceeded)
/// }
/// assert_eq!(Reason::WithinMinInterval.name(), "within_min_interval");
/// # assert!(!needs_operator(Reason::Held));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reason {
    /// Another claim holds the key, and its lease has not ended.
    Held,
    /// A program that does not know rowlock holds the key.
    HeldByAnotherProgram,
    /// The holder never ended its claim, and the lease is over. [`Rules::Article`] leaves the key
    /// to an operator ([`LeaseLock::force_release`](crate::LeaseLock::force_release)).
    TimedOutUnfinished,
    /// The key was claimed less than `min_interval` ago.
    WithinMinInterval,
    /// The last run failed. [`Rules::Article`] leaves the key to an operator.
    LastRunFailed,
    /// The status is not `S`. [`Rules::Article`] leaves the key to an operator.
    NotSucceeded,
    /// Earlier requests wait for the key in order ([`LeaseLock::fair`](crate::LeaseLock::fair)).
    /// Only fair handles receive this reason.
    Queued,
    /// Another transaction kept the row locked during the whole attempt (on SQLite: the file).
    Busy,
}

impl Reason {
    /// Returns a short name for programs. It never changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::HeldByAnotherProgram => "held_by_another_program",
            Self::TimedOutUnfinished => "timed_out_unfinished",
            Self::WithinMinInterval => "within_min_interval",
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
            Self::WithinMinInterval => "within its min interval",
            Self::LastRunFailed => "the last run failed",
            Self::NotSucceeded => "the last run did not succeed",
            Self::Queued => "other waiters precede it",
            Self::Busy => "busy",
        })
    }
}

/// Decides by the rules table whether `holder` may claim the key of this row now, on these terms.
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
    // Without a minimum interval, a begin_time in the future (rounded up by its column, or from a
    // clock that was set back) does not refuse the claim.
    let interval = (!terms.min_interval.is_zero()).then_some(terms.min_interval);
    let interval_ends = row.begin_time.zip(interval).map(|(begin, interval)| later(begin, interval));
    if interval_ends.is_none_or(|end| now >= end) || (row.status == "F" && terms.retry_failed) {
        Acquire
    } else {
        Refuse(WithinMinInterval, interval_ends)
    }
}

/// The state of a row at one moment, for display.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::admin::LockState;
///
/// let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
/// assert_eq!(lock.inspect("report").await?.map(|row| row.state), Some(LockState::Held));
/// lease.release().await?;
/// assert_eq!(lock.inspect("report").await?.map(|row| row.state), Some(LockState::Free));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LockState {
    /// A claim holds the key.
    Held,
    /// A claim whose lease is over holds the key: its holder crashed, was stopped, or abandoned it.
    Expired,
    /// A program that does not know rowlock holds the key.
    HeldByAnotherProgram,
    /// The key is free, but was claimed less than `min_interval` ago.
    WithinMinInterval,
    /// The key is free, and its last run failed.
    Failed,
    /// The key is free.
    Free,
}

impl LockState {
    /// Returns a short name for programs. It never changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Expired => "expired",
            Self::HeldByAnotherProgram => "held_by_another_program",
            Self::WithinMinInterval => "within_min_interval",
            Self::Failed => "failed",
            Self::Free => "free",
        }
    }
}

impl std::fmt::Display for LockState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WithinMinInterval => f.write_str("within its min interval"),
            state => f.write_str(&state.name().replace('_', " ")),
        }
    }
}

/// Returns the state of a row, and the time until which it lasts, if that is known.
pub fn state(row: &Row, now: DateTime<Utc>, terms: &Terms) -> (LockState, Option<DateTime<Utc>>) {
    if row.is_rowlocks() {
        let expired = row.expires_at.is_some_and(|end| now >= end);
        return (if expired { LockState::Expired } else { LockState::Held }, row.expires_at);
    }
    if row.locked {
        return (LockState::HeldByAnotherProgram, None);
    }
    let interval_ends = row.begin_time.map(|begin| later(begin, terms.min_interval)).filter(|end| now < *end);
    match interval_ends {
        _ if row.status == "F" => (LockState::Failed, interval_ends),
        Some(end) => (LockState::WithinMinInterval, Some(end)),
        None => (LockState::Free, None),
    }
}

/// Returns `from + distance`, or the latest possible time: rows of other programs may hold any
/// time.
fn later(from: DateTime<Utc>, distance: TimeDelta) -> DateTime<Utc> {
    from.checked_add_signed(distance).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

/// The reason why a key was not granted, the instance that claimed it last, and the time until
/// which the key is closed. A refusal is a result, not an error.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::Reason;
///
/// let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
/// let refusal = lock.try_acquire("report").await?.refused().expect("the key is held");
/// assert_eq!(refusal.reason, Reason::Held);
/// println!("{refusal}; ask again in {:?}", refusal.retry_after);
/// # drop(lease);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Refusal {
    /// The requested key. Of a semaphore, the permit that may be free first, or its name if other
    /// waiters precede the request.
    pub key: Key,
    /// Why the claim was refused.
    pub reason: Reason,
    /// The label of the last claim: the column `client_ip`.
    pub by: String,
    /// When that claim was made, on the database's clock.
    pub since: Option<DateTime<Utc>>,
    /// When the lease or the minimum interval ends, on the database's clock; `None` where an
    /// operator has to act.
    pub until: Option<DateTime<Utc>>,
    /// How long from now until a new request is useful. The holder may release the key sooner, or
    /// renew its lease.
    pub retry_after: Option<Duration>,
    /// A notification is sent when the row is freed.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) awaited: bool,
}

impl Refusal {
    /// Creates a refusal of which no more is known.
    pub(crate) fn bare(key: Key, reason: Reason) -> Self {
        Self { key, reason, by: String::new(), since: None, until: None, retry_after: None, awaited: false }
    }

    /// Creates the refusal from the row that caused it.
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
