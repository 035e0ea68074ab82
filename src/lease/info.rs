//! What operators see of the rows, and what they select.

use chrono::{DateTime, Utc};

use crate::{
    key::{Holder, Token},
    rules::{LockState, Terms, state},
    store::{
        admin::{Listed, Page, Seen},
        to_utc,
    },
};

/// Selects the rows that [`LeaseLock::list`](crate::LeaseLock::list) returns: all rows, a hundred
/// per page, by default.
///
/// ```
/// use rowlock::admin::ListOptions;
///
/// let claimed = ListOptions::default().claimed().prefix("import/").limit(20);
/// let next_page = claimed.clone().after("import/2026-11-22");
/// ```
#[derive(Clone, Debug)]
pub struct ListOptions(pub(crate) Page);

impl Default for ListOptions {
    fn default() -> Self {
        Self(Page { after: String::new(), prefix: String::new(), locked_only: false, limit: 100 })
    }
}

impl ListOptions {
    /// Selects only locked rows, including expired ones.
    pub fn claimed(mut self) -> Self {
        self.0.locked_only = true;
        self
    }

    /// Selects only keys that begin with `prefix`.
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.0.prefix = prefix.to_owned();
        self
    }

    /// Selects only keys that sort after `key`, which is the last key of the previous page.
    pub fn after(mut self, key: &str) -> Self {
        self.0.after = key.to_owned();
        self
    }

    /// Returns at most `rows` rows per page.
    pub fn limit(mut self, rows: u32) -> Self {
        self.0.limit = rows;
        self
    }
}

/// A row of the table, for display. Times are from the database's clock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::admin::LockState;
///
/// let _lease = lock.try_acquire("report").await?;
/// let row = lock.inspect("report").await?.expect("the key has a row");
/// assert_eq!(row.state, LockState::Held);
/// println!("{} is {} by {} until {:?}", row.key, row.state, row.by, row.until);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LockInfo {
    /// The key.
    pub key: String,
    /// The state of the row when it was read, judged by the minimum interval of the handle that
    /// read it. The row does not record that interval.
    pub state: LockState,
    /// The end of the lease or of the minimum interval.
    pub until: Option<DateTime<Utc>>,
    /// When the key was last acquired.
    pub since: Option<DateTime<Utc>>,
    /// When the key was last released.
    pub ended: Option<DateTime<Utc>>,
    /// The label of the last holder: the column `client_ip`.
    pub by: String,
    /// The column `status`: `S`, `F`, `P`, or what another program wrote.
    pub status: String,
    /// The highest token assigned so far.
    pub token: Token,
    /// The claim that holds the key.
    pub holder: Option<Holder>,
    /// When the row was read.
    pub now: DateTime<Utc>,
}

impl LockInfo {
    pub(crate) fn new(listed: Listed, terms: &Terms) -> Self {
        let Listed { key, row, end_time, now } = listed;
        let (state, until) = state(&row, now, terms);
        Self {
            key,
            state,
            until,
            since: row.begin_time,
            ended: end_time,
            by: row.client_ip,
            status: row.status,
            token: Token::new(row.token),
            holder: row.holder.map(Holder::new),
            now,
        }
    }

    /// Returns what tells the row from every later one, on the terms under which it was read.
    pub(crate) fn seen(&self, terms: &Terms) -> Seen {
        let kept = |time| to_utc(time, -terms.offset());
        Seen {
            token: self.token.get(),
            holder: self.holder.map(|holder| *holder.as_uuid()),
            begin_time: self.since.map(kept),
            end_time: self.ended.map(kept),
        }
    }
}

/// The result of
/// [`LeaseLock::force_release_if_unchanged`](crate::LeaseLock::force_release_if_unchanged).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::{Status, admin::ForcedRelease};
///
/// let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
/// let seen = lock.inspect("report").await?.expect("the key has a row");
/// lease.release().await?;
/// match lock.force_release_if_unchanged(&seen, Status::Failed).await? {
///     ForcedRelease::Released(token) => println!("free, under token {token}"),
///     ForcedRelease::Changed(Some(row)) => println!("left alone: it is {} by {}", row.state, row.by),
///     ForcedRelease::Changed(None) => println!("its row was deleted"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the key may not have been released"]
pub enum ForcedRelease {
    /// The key is free, under this new token.
    Released(Token),
    /// The row is not what was seen, and was left alone. It is the row as it is now; `None` if it
    /// was deleted.
    Changed(Option<LockInfo>),
}
