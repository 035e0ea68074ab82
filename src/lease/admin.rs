//! Administrative operations: inspection, forced release, deletion of old rows.

use std::time::Duration;

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::{Key, Token},
    lease::{
        info::{ForcedRelease, ListOptions, LockInfo},
        lock::LeaseLock,
    },
    retry::pause,
    rules::Status,
    session::time::Instant,
    store::{
        Database, Reply,
        admin::{Change, ChangeInfo, Forced, Listed, Seen, recorded},
        failure::Failure,
        fault::Fault,
    },
};

pub(super) const TABLE: &str = "the table t_resource_lock";
const CHANGES: &str = "the table t_resource_change";
pub(super) const QUEUE: &str = "the table t_resource_lock_queue";

/// Operations for operators. None of them waits for a row that another transaction has locked, but
/// `force_release` retries until its time limit.
impl<DB: Database> LeaseLock<DB> {
    /// Lists rows in key order, one page per call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of its range, [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::admin::ListOptions;
    ///
    /// let mut page = ListOptions::default().claimed();
    /// loop {
    ///     let rows = lock.list(&page).await?;
    ///     for row in &rows {
    ///         println!("{}: {} by {}", row.key, row.state, row.by);
    ///     }
    ///     let Some(last) = rows.last() else { break };
    ///     page = page.after(&last.key);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn list(&self, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
        let filter = filter.clone();
        let list = |lock: Self| async move {
            let terms = &lock.key_terms.terms;
            let listed = lock.look(TABLE, async |conn| DB::list(conn, &filter.0, terms).await).await?;
            Ok(listed.into_iter().map(|listed| LockInfo::new(listed, terms)).collect())
        };
        self.on_thread(list).await
    }

    /// Returns the row of `key`, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// match lock.inspect("report").await? {
    ///     Some(row) => println!("{}, last claimed by {} at {:?}", row.state, row.by, row.since),
    ///     None => println!("never claimed"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn inspect(&self, key: &str) -> Result<Option<LockInfo>, Error> {
        let listed = self.read(&Key::new(key)?).await?;
        Ok(listed.map(|listed| LockInfo::new(listed, &self.key_terms.terms)))
    }

    /// Returns how many waiters each key has: those that wait on [fair](LeaseLock::fair) handles,
    /// which alone draw tickets. Keys without waiters are left out. A waiter that died counts until
    /// its ticket lapses, 12 s after its last heartbeat.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of its range, [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// for (key, waiters) in lock.queue_lengths().await? {
    ///     println!("{waiters} wait for {key}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn queue_lengths(&self) -> Result<Vec<(String, u64)>, Error> {
        let lengths = |lock: Self| async move {
            let lengths = lock.look(QUEUE, async |conn| DB::queue_lengths(conn).await).await?;
            Ok(lengths.into_iter().map(|(key, length)| (key, u64::try_from(length).unwrap_or_default())).collect())
        };
        self.on_thread(lengths).await
    }

    /// Reads the row of `key`.
    pub(crate) async fn read(&self, key: &Key) -> Result<Option<Listed>, Error> {
        let key = key.clone();
        let read = |lock: Self| async move {
            let terms = &lock.key_terms.terms;
            lock.look(&key.quoted(), async |conn| DB::inspect(conn, &key, terms).await).await
        };
        self.on_thread(read).await
    }

    /// Releases `key` regardless of its holder and writes `status`. Returns the key's new token, or
    /// `None` if the key has no row.
    ///
    /// The previous holder detects the loss at its next renewal or release and cannot restore the
    /// claim. Its work may continue until then. No [`lock_delay`](Self::lock_delay) is kept: the
    /// key is free at once. Make sure first that the work of the holder has stopped.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Setup`], and [`Error::Database`], also if other transactions
    /// had the row locked until the time limit. If the reply is lost, the key may have been
    /// released, and claimed since: [`inspect`](Self::inspect) it before the call is repeated.
    ///
    /// # Cancel safety
    /// If the future is dropped, the key may have been released.
    ///
    /// # Examples
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
    /// let token = lock.force_release("report", Status::Succeeded).await?;
    /// assert!(token > Some(lease.token()));
    /// assert!(lease.renew().await.is_err()); // the claim is lost
    /// # Ok(())
    /// # }
    /// ```
    pub async fn force_release(&self, key: &str, status: Status) -> Result<Option<Token>, Error> {
        self.force(Key::new(key)?, status, None).await
    }

    /// Releases a key as [`force_release`](Self::force_release) does, but only if its row is still
    /// the one that this handle read: another claim, a release, or a lock by another program since
    /// then leaves the row alone. A renewal changes nothing. The comparison and the release are one
    /// statement.
    ///
    /// # Errors
    /// As [`force_release`](Self::force_release).
    ///
    /// # Cancel safety
    /// If the future is dropped, the key may have been released.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// # let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
    /// use rowlock::{Status, admin::ForcedRelease};
    ///
    /// let seen = lock.inspect("report").await?.expect("the key has a row");
    /// println!("release {}, held by {} since {:?}?", seen.key, seen.by, seen.since); // an operator says yes
    /// let released = lock.force_release_if_unchanged(&seen, Status::Failed).await?;
    /// assert!(matches!(released, ForcedRelease::Released(token) if token > seen.token));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn force_release_if_unchanged(&self, seen: &LockInfo, status: Status) -> Result<ForcedRelease, Error> {
        let expected = seen.seen(&self.key_terms.terms);
        Ok(match self.force(Key::new(&seen.key)?, status, Some(expected)).await? {
            Some(token) => ForcedRelease::Released(token),
            None => ForcedRelease::Changed(self.inspect(&seen.key).await?),
        })
    }

    /// Releases a key by force, if its row is as expected. Returns the new token, or `None` if it
    /// was not released.
    async fn force(&self, key: Key, status: Status, expected: Option<Seen>) -> Result<Option<Token>, Error> {
        self.on_thread(move |lock| async move { lock.force_here(&key, status, expected.as_ref()).await }).await
    }

    async fn force_here(&self, key: &Key, status: Status, expected: Option<&Seen>) -> Result<Option<Token>, Error> {
        let limit = self.checked_deadline().await?;
        let time_limit = self.shared.time_limit;
        let busy = || Error::timed_out(Action::ForceRelease, key.quoted(), time_limit, Certainty::NothingChanged);
        let mut skipped = false;
        loop {
            let force = async |conn: &mut DB::Connection| self.force_and_record(conn, key, status, expected).await;
            match self.shared.sessions.send_once(limit, force).await {
                Ok(Forced::Freed(token)) => {
                    tracing::warn!(%key, %token, status = status.letter(), "released by force");
                    return Ok(Some(token));
                }
                Ok(Forced::Changed) => return Ok(None),
                Ok(Forced::Skipped) if Instant::now() >= limit => return Err(busy()),
                Err(failure) if skipped && failure.fault() == Fault::NoConnection => return Err(busy()),
                Err(failure) if failure.fault() != Fault::Contention || Instant::now() >= limit => {
                    return Err(self.failed(failure, Action::ForceRelease, &key.quoted()));
                }
                Ok(Forced::Skipped) | Err(_) => {
                    skipped = true;
                    pause(10..40).await;
                }
            }
        }
    }

    /// Frees a row, and records in the same transaction from whom.
    async fn force_and_record(
        &self,
        conn: &mut DB::Connection,
        key: &Key,
        status: Status,
        expected: Option<&Seen>,
    ) -> Reply<Forced> {
        let terms = &self.key_terms.terms;
        if !self.shared.keeps_changes() {
            tracing::warn!(%key, "the release is not recorded: the table t_resource_change is missing, see `rowlock migrate`");
            return DB::force(conn, key, status, expected, terms).await;
        }
        let change = Change { who: &terms.label, what: "released", name: key.as_str() };
        let mut forced = Forced::Changed;
        let force = async |conn: &mut DB::Connection| {
            forced = DB::force(conn, key, status, expected, terms).await?;
            let Forced::Freed(_) = forced else { return Ok(None) };
            let by = DB::inspect(conn, key, terms).await?.map(|freed| freed.row.client_ip).unwrap_or_default();
            let under = expected.map(|seen| format!(", token {}", seen.token)).unwrap_or_default();
            Ok(Some(format!("from {by}{under}; status {}", status.letter())))
        };
        recorded::<DB>(conn, &change, force).await.map(|_| forced)
    }

    /// Returns at most `limit` changes that operators have made, the latest first: those of a key,
    /// a schedule or an instance, or all of them.
    /// `Schedules::forget_history` deletes old ones.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of its range, [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
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
    /// lock.force_release("report", Status::Failed).await?;
    /// let changes = lock.changes(Some("report"), 10).await?;
    /// assert_eq!(changes[0].what, "released");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn changes(&self, name: Option<&str>, limit: u32) -> Result<Vec<ChangeInfo>, Error> {
        let name = name.map(str::to_owned);
        let changes = |lock: Self| async move {
            lock.look(CHANGES, async |conn| DB::changes(conn, name.as_deref(), limit).await).await
        };
        self.on_thread(changes).await
    }

    /// Deletes rows that have not been touched for `older_than` and returns their number.
    ///
    /// It never deletes a row that is locked, that is within its minimum interval (its own `time`
    /// or the longest `min_interval` that a handle of this lock has had), or whose status is not
    /// `S`: [`Rules::Article`](crate::Rules::Article) still refuses on that status. Nor does it
    /// delete a row whose token is ahead of the database's clock, because the key's next token
    /// would be lower. It also deletes
    /// queue tickets whose waiters died more than an hour ago, which are not counted.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than ten years; [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, some of the rows may be deleted. Another call deletes the rest.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use std::time::Duration;
    ///
    /// let rows = lock.forget(Duration::from_secs(30 * 24 * 60 * 60)).await?;
    /// println!("{rows} rows deleted");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn forget(&self, older_than: Duration) -> Result<u64, Error> {
        self.on_thread(move |lock| async move { lock.forget_in_steps(older_than, 0).await }).await
    }

    /// Checks for a usable table, and returns the deadline of the operation.
    pub(super) async fn checked_deadline(&self) -> Result<Instant, Error> {
        let limit = Instant::now() + self.shared.time_limit;
        self.shared.known_table(limit).await?;
        Ok(limit)
    }

    /// Sends a statement that reads. An operator's request is not sent again.
    async fn look<T>(
        &self,
        subject: &str,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Error> {
        let limit = self.checked_deadline().await?;
        let seen = self.shared.sessions.send_once(limit, statement).await;
        seen.map_err(|failure| self.failed(failure, Action::Inspect, subject))
    }

    fn failed(&self, failure: Failure, action: Action, subject: &str) -> Error {
        failure.into_error(action, subject.to_owned(), self.shared.time_limit, Certainty::NothingChanged)
    }
}
