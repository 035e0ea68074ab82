//! The lock as its users see it.

use std::{fmt, time::Duration};

use crate::{
    access::Access,
    causes::NotFound,
    error::Error,
    grant::Attempt,
    invalid::Invalid,
    key::Key,
    lease::{guard::Lease, lock::LeaseLock},
    pacing::retry_backoff,
    read_write::{call::Call, names::Names},
    rules::Rules,
    session::timers::sleep,
    store::Database,
};

/// A lock that many readers or one writer hold at a time.
///
/// The writer holds the key of the lock's name. A reader holds one of the keys `NAME#r1` to
/// `NAME#r1024`, so that at most 1,024 readers hold the lock at a time. Each of these claims has
/// all that a claim has: a lease that is renewed, a takeover after a crash, a fencing token, and
/// [`confirm`](crate::ResourceLock::confirm). [`LeaseLock::list`] shows who reads and who writes.
///
/// A writer that waits for readers keeps new readers out. Readers that find the name held wait for
/// it in one queue with the writers, so neither side starves. With a [`fair`](LeaseLock::fair)
/// handle that queue is in order across processes.
///
/// A plain claim on the name, such as [`LeaseLock::acquire`], keeps readers and writers from being
/// let in, but does not wait for the readers that are in.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use std::time::Duration;
///
/// let cache = lock.read_write("cache");
/// let reader = cache.readers().acquire(Duration::from_secs(5)).await?;
/// assert!(cache.writer().try_acquire().await?.refused().is_some());
/// assert!(cache.readers().try_acquire().await?.acquired().is_some()); // readers run together
/// reader.release().await?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "RwLock")]
pub struct ReadWriteLock<DB: Database> {
    lock: LeaseLock<DB>,
    names: Names,
    readers: Access<DB>,
    writer: Access<DB>,
}

impl<DB: Database> Clone for ReadWriteLock<DB> {
    fn clone(&self) -> Self {
        let Self { lock, names, readers, writer } = self;
        Self { lock: lock.clone(), names: names.clone(), readers: readers.clone(), writer: writer.clone() }
    }
}

impl<DB: Database> fmt::Debug for ReadWriteLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadWriteLock").field("name", &self.names.name).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Returns a lock that many readers or one writer hold at a time, on the terms of this handle.
    /// Nothing is sent.
    ///
    /// The first call reports a name that is no key, or too long for what is added to the keys of
    /// readers. It also reports a handle with a minimum interval, which a reader that waits for the
    /// name would begin, or with [`Rules::Article`], under which a reader that crashes would keep
    /// writers out until an operator acts.
    pub fn read_write(&self, name: &str) -> ReadWriteLock<DB> {
        let (mut lock, terms) = (self.clone(), &self.key_terms.terms);
        let mut refuse = |value, rule| lock.faults.add(Invalid::setting("a read-write lock", value, rule));
        if !terms.min_interval.is_zero() {
            refuse("a handle with a minimum interval", "its handle has to have no minimum interval");
        }
        if terms.rules != Rules::Recover {
            refuse("a handle with Rules::Article", "its handle has to have Rules::Recover");
        }
        let names = lock.faults.accept(Names::new(name)).unwrap_or_else(Names::none);
        let (readers, writer) =
            (Access::readers(lock.clone(), names.clone()), Access::writer(lock.clone(), names.clone()));
        ReadWriteLock { lock, names, readers, writer }
    }
}

impl<DB: Database> ReadWriteLock<DB> {
    /// Returns the name: the key that a writer holds.
    pub fn name(&self) -> &Key {
        &self.names.name
    }

    /// Returns the readers' access.
    pub fn readers(&self) -> &Access<DB> {
        &self.readers
    }

    /// Returns the writer's access.
    pub fn writer(&self) -> &Access<DB> {
        &self.writer
    }

    /// Turns the writer's lease into that of a reader. No other writer is let in between.
    ///
    /// The claim on a reader's key is made while the name is held, and repeated for as long as the
    /// writer's lease stands. The name is then released with the status `S`, unless another handle
    /// on the writer's lease exists.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a lease on another key; [`Error::Lost`] if the writer's lease is
    /// lost; otherwise as [`LeaseLock::try_acquire`]. The writer's lease is abandoned.
    ///
    /// # Cancel safety
    /// If the future is dropped, both claims are ended.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let cache = rowlock::LeaseLock::new(pool).read_write("cache");
    /// let writer = cache.writer().try_acquire().await?.acquired().expect("the lock is free");
    /// let reader = cache.downgrade(writer).await?;
    /// assert!(cache.readers().try_acquire().await?.acquired().is_some()); // beside other readers
    /// # Ok(())
    /// # }
    /// ```
    pub async fn downgrade(&self, writer: Lease<DB>) -> Result<Lease<DB>, Error> {
        let this = self.clone();
        self.lock.on_thread(|_| async move { this.downgrade_here(writer).await }).await
    }

    async fn downgrade_here(&self, writer: Lease<DB>) -> Result<Lease<DB>, Error> {
        if *writer.key() != self.names.name {
            return Err(NotFound::Claim { key: self.names.name.clone(), holder: writer.claim().holder }.into());
        }
        let claimed = async {
            let call = Call::new(&self.lock, &self.names, Duration::MAX).await?;
            let mut pauses = retry_backoff();
            loop {
                match call.claim_reader(true).await {
                    Ok(Attempt::Acquired(reader)) => return Ok(reader),
                    Ok(Attempt::Refused(refusal)) => tracing::debug!(%refusal, "no key of a reader is free"),
                    Err(error) if error.is_retryable() => tracing::debug!(%error, "the downgrade is retried"),
                    Err(error) => return Err(error),
                }
                sleep(pauses.next()).await;
            }
        };
        let lost = || writer.handle.error_lost();
        let reader = tokio::select! {
            biased;
            () = writer.lost() => return Err(lost()),
            claimed = claimed => claimed?,
        };
        if !writer.is_held() || !reader.held.stands() {
            return Err(lost());
        }
        let token = writer.token();
        if let Err(error) = writer.release().await {
            tracing::debug!(%error, "the writer's claim ends later");
        }
        Ok(Lease::of_reader((reader, token, None)))
    }

    /// Attempts once to become the writer while reading, without waiting for others.
    ///
    /// It is granted if no other reader is there and the name is free: no other writer was let in
    /// since the reader was. Otherwise nothing has changed. Two readers that upgrade are never both
    /// granted, and none of them waits.
    ///
    /// The reader's lease stays as it is. The caller reads on once it has released the writer's
    /// lease, or ends the reader's lease as well.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a lease that is not that of a reader of this lock; [`Error::Lost`]
    /// if the reader's lease is lost, or the claim on the name did not stand for as long as the
    /// read took; otherwise as [`LeaseLock::try_acquire`].
    ///
    /// # Cancel safety
    /// As [`LeaseLock::acquire`]. The reader's lease stays as it is.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let cache = rowlock::LeaseLock::new(pool).read_write("cache");
    /// use rowlock::Attempt;
    ///
    /// let reader = cache.readers().try_acquire().await?.acquired().expect("no writer is there");
    /// match cache.try_upgrade(&reader).await? {
    ///     Attempt::Acquired(writer) => writer.release().await?, // reads on
    ///     Attempt::Refused(refusal) => println!("others read: {refusal}"),
    /// }
    /// reader.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_upgrade(&self, reader: &Lease<DB>) -> Result<Attempt<Lease<DB>>, Error> {
        self.lock.check()?;
        if self.names.number(reader.key().as_str()).is_none() {
            return Err(NotFound::Claim { key: self.names.name.clone(), holder: reader.claim().holder }.into());
        }
        // The rest of the call stays with its caller.
        self.lock.check_admits(vec![self.names.longest.clone()]).await?;
        let call = Call::new(&self.lock, &self.names, Duration::ZERO).await?;
        match call.write(Some(reader.claim())).await? {
            // Its lease stood when the name was claimed: no other writer was let in before.
            Attempt::Acquired(name) if reader.is_held() => Ok(Attempt::Acquired(Lease::new(name))),
            Attempt::Acquired(_) => Err(reader.handle.error_lost()),
            Attempt::Refused(refusal) => Ok(Attempt::Refused(refusal)),
        }
    }
}
