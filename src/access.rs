//! One of several accesses to a name: a permit, a reader's or the writer's.

use std::{fmt, time::Duration};

use crate::{
    error::Error,
    grant::Attempt,
    invalid::Invalid,
    key::Key,
    lease::{guard::Lease, held::Held, lock::LeaseLock, wanted::Wanted},
    read_write::{call::Call, names::Names},
    store::Database,
    transaction::{
        self,
        error::{RunError, WorkError},
        tx::Tx,
    },
};

/// The most permits of a semaphore: as many as a set has keys.
const MAX_PERMITS: u32 = 100;

/// A permit of a semaphore ([`LeaseLock::semaphore`]), or the readers' or the writer's access to a
/// [`ReadWriteLock`](crate::ReadWriteLock): it has the methods that a [`LeaseLock`] has for a key.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use std::time::Duration;
///
/// let exports = lock.semaphore("exports", 3);
/// let permit = exports.acquire(Duration::from_secs(5)).await?;
/// println!("export with permit {:?}", exports.number(permit.key()));
/// permit.release().await?;
///
/// let cache = lock.read_write("cache");
/// let read = async |_held| Ok::<_, std::io::Error>(7);
/// assert_eq!(cache.readers().run(Duration::from_secs(5), read).await?, 7);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "Semaphore")]
pub struct Access<DB: Database> {
    lock: LeaseLock<DB>,
    name: Key,
    of: Of,
}

/// What can be acquired of a name.
#[derive(Clone)]
enum Of {
    /// The permits of a semaphore.
    Permits(Wanted),
    Readers(Names),
    Writer(Names),
}

impl<DB: Database> Clone for Access<DB> {
    fn clone(&self) -> Self {
        Self { lock: self.lock.clone(), name: self.name.clone(), of: self.of.clone() }
    }
}

impl<DB: Database> fmt::Debug for Access<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match &self.of {
            Of::Permits(wanted) => format!("{} permits", wanted.keys.len()),
            Of::Readers(_) => "readers".to_owned(),
            Of::Writer(_) => "writer".to_owned(),
        };
        f.debug_struct("Access").field("name", &self.name).field("of", &of).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Returns a semaphore of 1 to 100 permits, on the terms of this handle. Nothing is sent.
    ///
    /// A permit is a claim on one of the keys `NAME#1` to `NAME#N`, with all that a claim has: a
    /// lease that is renewed, a takeover after a crash, a fencing token, and
    /// [`confirm`](crate::ResourceLock::confirm). [`list`](Self::list) shows each permit with its
    /// holder. The token is that of the permit: a resource that is guarded by tokens is guarded for
    /// each permit.
    ///
    /// The number of permits may differ between instances, as it does while a change is deployed.
    /// Claims on permits above an instance's own number end with their holders, and are not taken
    /// again by that instance.
    ///
    /// A [`fair`](Self::fair) handle grants permits first come, first served. A minimum interval
    /// applies to each permit. A name that is no key, or too long for the number that is added, and
    /// a number of permits out of its range, are reported by the first call.
    pub fn semaphore(&self, name: &str, permits: u32) -> Access<DB> {
        let mut lock = self.clone();
        if !(1..=MAX_PERMITS).contains(&permits) {
            let value = format!("{permits} permits");
            lock.faults.add(Invalid::setting("a semaphore", value, "it has to have 1 to 100 permits"));
        }
        let known = permits.clamp(1, MAX_PERMITS);
        let wanted = lock.faults.accept(permits_of(name, known)).unwrap_or_else(|| Wanted::all([Key::none()].into()));
        let name = Key::new(name).unwrap_or_else(|_| Key::none());
        Access { lock, name, of: Of::Permits(wanted) }
    }
}

impl<DB: Database> Access<DB> {
    pub(crate) fn readers(lock: LeaseLock<DB>, names: Names) -> Self {
        Self { lock, name: names.name.clone(), of: Of::Readers(names) }
    }

    pub(crate) fn writer(lock: LeaseLock<DB>, names: Names) -> Self {
        Self { lock, name: names.name.clone(), of: Of::Writer(names) }
    }

    /// Returns the name.
    pub fn name(&self) -> &Key {
        &self.name
    }

    /// Returns the number of a permit or of a reader, counted from 1, by its key; `None` for any
    /// other key. The number of a permit may be above that of this instance's own permits, since
    /// other instances may have more.
    pub fn number(&self, key: &Key) -> Option<u32> {
        match &self.of {
            Of::Permits(_) => Key::number_after(key.as_str(), &self.name, "#", MAX_PERMITS),
            Of::Readers(names) => names.number(key.as_str()),
            Of::Writer(_) => None,
        }
    }

    /// Attempts once to be granted access, without waiting for a holder.
    ///
    /// **A permit** takes one round trip if the one that is claimed first is free. This process
    /// chooses it among those that it believes to be free. Otherwise it takes two more: a read of
    /// all permits, and the claim on a free one. The refusal names the permit that may be free
    /// first, or the semaphore if other waiters precede the call.
    ///
    /// **A reader** takes two round trips: a claim on a reader's key, and a read of the name's row,
    /// which concurrent readers share. The first reader after a writer that did not end its claim
    /// takes that claim over, and [`Lease::taken_over_from`] returns it: the writer's work may be
    /// half done. A reader that waited for the name holds it for a moment when it enters, and so
    /// does one that has taken over, and the first reader of a name that has no row. In that moment
    /// another attempt is refused as beside a writer. [`acquire`](Self::acquire) waits for its end.
    ///
    /// **A writer** takes two round trips: a claim on the name, and a read of the keys of readers.
    /// If there are readers, the name is freed again and the refusal names one of them.
    ///
    /// # Errors
    /// As [`LeaseLock::try_acquire`]. For a writer [`Error::Lost`] if the claim on the name did not
    /// stand while the read ran.
    ///
    /// # Cancel safety
    /// As [`LeaseLock::acquire`].
    pub async fn try_acquire(&self) -> Result<Attempt<Lease<DB>>, Error> {
        Attempt::of(self.acquire(Duration::ZERO).await)
    }

    /// Acquires access, retrying until it is granted or `wait` has passed. A release by this
    /// process ends a pause. On PostgreSQL and SQLite a release by another process ends it too. On
    /// MySQL and MariaDB the next request finds it, after at most one second.
    ///
    /// A reader's lease has a [`writer_token`](Lease::writer_token), which fences the reader's work
    /// against later writers. A reader waits while a writer holds the name, or waits for readers
    /// that were there before. While 1,024 readers are in, the next one waits too.
    ///
    /// A writer claims the name, which keeps new readers out, and then waits for the readers that
    /// were let in before. A reader that crashed is waited for until its lease ends, and a
    /// transaction that has confirmed a reader's lease until it ends.
    ///
    /// # Errors
    /// As [`LeaseLock::acquire`].
    ///
    /// # Cancel safety
    /// As [`LeaseLock::acquire`].
    pub async fn acquire(&self, wait: Duration) -> Result<Lease<DB>, Error> {
        Ok(match &self.of {
            Of::Permits(wanted) => Lease::new(self.lock.granted(wanted, wait).await?.into_result()?),
            Of::Readers(names) => {
                let names = names.clone();
                let read = |lock: LeaseLock<DB>| async move { Call::new(&lock, &names, wait).await?.read().await };
                Lease::of_reader(self.lock.on_thread(read).await?.into_result()?)
            }
            Of::Writer(names) => {
                let names = names.clone();
                let written =
                    |lock: LeaseLock<DB>| async move { Call::new(&lock, &names, wait).await?.write(None).await };
                Lease::new(self.lock.on_thread(written).await?.into_result()?)
            }
        })
    }

    /// Runs `work` with access, as [`LeaseLock::run`] does.
    ///
    /// # Errors
    /// As [`LeaseLock::run`].
    ///
    /// # Cancel safety
    /// As [`LeaseLock::run`].
    pub async fn run<T, E, W, F>(&self, wait: Duration, work: W) -> Result<T, RunError<E>>
    where
        W: FnOnce(Held) -> F,
        F: Future<Output = Result<T, E>>,
    {
        self.lock.run_with(self.name.as_str(), wait, self.acquire(wait), work).await
    }

    /// Runs `work` in a transaction that commits only if the access stands until its end, as
    /// [`LeaseLock::transaction`] does.
    ///
    /// # Errors
    /// As [`LeaseLock::transaction`]. For a writer also [`RunError::Lost`], as
    /// [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// As [`LeaseLock::transaction`].
    pub async fn transaction<T, E, W, F>(&self, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        let acquire = async |wait| Ok(self.acquire(wait).await?.into());
        transaction::run(&self.lock, self.name.as_str(), &|wait| Box::pin(acquire(wait)), work).await
    }
}

/// Returns the permits of a semaphore. Waiters queue under a key that is no permit's, so that
/// instances with different numbers of permits wait in one queue.
fn permits_of(name: &str, permits: u32) -> Result<Wanted, Invalid> {
    let keys = (1..=permits).map(|number| Key::new(&format!("{name}#{number}"))).collect::<Result<Vec<_>, _>>()?;
    Ok(Wanted::any(keys.into(), Key::new(&format!("{name}#"))?, Key::new(name)?))
}
