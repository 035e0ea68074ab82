//! The schedules of an application, with their work.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use chrono::TimeDelta;
use sqlx::Pool;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    invalid::{Faults, Invalid},
    key::Key,
    label,
    lease::lock::LeaseLock,
    retry::{TIME_LIMIT, time_limit, within},
    rules::Rules,
    schedule::{
        busy::Busy,
        core::Core,
        instances::Declared,
        presence::Presence,
        run::{self, Job},
        runner::Running,
        spec::{Schedule, lease_of_runs},
        tick::Tick,
    },
    session::{
        sessions::{Purpose, Sessions},
        threads,
    },
    store::Database,
};

/// The most schedules of one instance: what one statement can name.
const MAX_SCHEDULES: usize = 10_000;

/// Schedules with their work: each tick runs on one of the instances that know it, and on another
/// one if that dies.
///
/// Every instance creates the same schedules and calls [`start`](Self::start). The table
/// `t_resource_schedule` has one row for each; [`migrate`](crate::migrate) creates it. The slot of
/// a row is moved on when a run **ends**, so a crash loses no tick.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// use std::time::Duration;
/// use rowlock::{Schedule, Schedules, Tick, jobs::CatchUp};
///
/// rowlock::migrate(&pool).await?;
/// let schedules = Schedules::new(pool)
///     .on(
///         Schedule::cron("nightly-report", "30 2 * * *").zone("Europe/Berlin"),
///         async |tick: Tick<_>| {
///             println!("the report of {}, {} missed", tick.slot(), tick.missed());
///             Ok::<_, std::io::Error>(())
///         },
///     )
///     .on(
///         Schedule::every("refresh", Duration::from_secs(30)).catch_up(CatchUp::Skip),
///         async |_| Ok::<_, std::io::Error>(()),
///     );
/// let running = schedules.start().await?;
/// // ... until the program is asked to end
/// running.shutdown(Duration::from_secs(20)).await;
/// # Ok(())
/// # }
/// ```
#[must_use = "schedules run after `start`"]
pub struct Schedules<DB: Database> {
    /// What is copied for each call. Calls that follow each other use the same sessions.
    settings: Core<DB>,
    /// Schedules that the application had once.
    removed: Vec<Key>,
    /// That of the instance whose place this one takes.
    busy: Option<Arc<Busy>>,
    pub(super) jobs: Vec<Job<DB>>,
    faults: Faults,
}

impl<DB: Database> Schedules<DB> {
    /// Creates an instance without schedules on the pool's database. Nothing is sent yet.
    pub fn new(pool: Pool<DB>) -> Self {
        let settings = Core {
            requests: Sessions::new(pool, Purpose::Requests),
            label: label::default(),
            default_lease: TimeDelta::seconds(30),
            time_limit: TIME_LIMIT,
            poll_interval: Duration::from_secs(2),
            max_concurrent_runs: 32,
            max_concurrent_runs_in: HashMap::new(),
            build: String::new(),
            lock: None,
        };
        Self { settings, removed: Vec::new(), busy: None, jobs: Vec::new(), faults: Faults::default() }
    }

    /// Adds a schedule with its work.
    ///
    /// An error of the work makes the run fail, and so does a panic. The history records the first
    /// 1,000 characters of the error as `{:#}` formats it: with its causes, if it is one of
    /// `anyhow`. The work is dropped if the run loses its lease or its key, takes longer than its
    /// timeout, or is stopped.
    ///
    /// # Examples
    /// Each run calls a clone of the work, which may own a pool, or anything else:
    ///
    /// ```
    /// # fn example(pool: sqlx::SqlitePool, nightly: rowlock::Schedule) {
    /// use rowlock::{Schedules, Tick};
    ///
    /// let accounts = pool.clone();
    /// let jobs = Schedules::new(pool).on(nightly, async move |tick: Tick<_>| {
    ///     let sql = "INSERT INTO report (day) VALUES (?)";
    ///     sqlx::query(sql).bind(tick.slot()).execute(&accounts).await
    /// });
    /// # }
    /// ```
    pub fn on<T, E, W, F>(mut self, schedule: Schedule, work: W) -> Self
    where
        E: fmt::Display,
        W: FnOnce(Tick<DB>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let work: run::Work<DB> = Arc::new(move |tick| {
            let work = work.clone()(tick);
            Box::pin(async move { work.await.map(drop).map_err(|error| format!("{error:#}")) })
        });
        self.jobs.push(Job { schedule: Arc::new(schedule), work });
        self
    }

    /// Sets after how long without a renewal another instance runs a tick again: 30 s by default. A
    /// schedule may have [another one](Schedule::lease).
    pub fn lease(mut self, lease: Duration) -> Self {
        let checked = self.faults.accept(lease_of_runs(lease));
        self.settings.default_lease = checked.unwrap_or(self.settings.default_lease);
        self
    }

    /// Sets the label of this instance, which the history records: host name and process id by
    /// default. It has at most 45 characters, none of them a control character.
    pub fn label(mut self, label: &str) -> Self {
        self.faults.accept(label::check(label));
        label.clone_into(&mut self.settings.label);
        self
    }

    /// Sets how long one statement may take, including the wait for a connection: 1 ms to one hour,
    /// 5 s by default.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        let checked = self.faults.accept(time_limit(limit));
        self.settings.time_limit = checked.unwrap_or(self.settings.time_limit);
        self
    }

    /// Sets the longest pause between two polls of the table: 10 ms to one hour, 2 s by default. An
    /// instance knows when its schedules are due; the pause delays a trigger, and what other
    /// instances hand back. A beat takes the place of some polls, so that the delay is two pauses
    /// at most.
    pub fn poll_interval(mut self, pause: Duration) -> Self {
        let (least, most) = (Duration::from_millis(10), Duration::from_secs(3600));
        let checked = within("a poll interval", pause, least, most, "it has to be from 10 ms to one hour");
        if self.faults.accept(checked).is_some() {
            self.settings.poll_interval = pause;
        }
        self
    }

    /// Sets how many ticks this instance runs at the same time: 1 to 10,000, 32 by default.
    pub fn max_concurrent_runs(mut self, runs: u32) -> Self {
        self.faults.accept(number_of_runs(runs));
        self.settings.max_concurrent_runs = runs;
        self
    }

    /// Sets how many ticks of the schedules of a [group](Schedule::group) this instance runs at the
    /// same time. They also count as [concurrent runs](Self::max_concurrent_runs) of the instance.
    /// Each group that has such a limit takes a statement of its own in each poll. A limit is from
    /// 1 to 10,000.
    ///
    /// # Examples
    /// ```
    /// # fn example<DB: rowlock::Database>(jobs: rowlock::Schedules<DB>) {
    /// use rowlock::{Schedule, Tick};
    ///
    /// let mut jobs = jobs.max_concurrent_runs_in("imports", 2);
    /// for shop in ["berlin", "paris", "rome"] {
    ///     let import = Schedule::cron(&format!("import-{shop}"), "0 3 * * *").group("imports");
    ///     jobs = jobs.on(import, async |_: Tick<DB>| Ok::<_, std::io::Error>(()));
    /// }
    /// # }
    /// ```
    pub fn max_concurrent_runs_in(mut self, group: &str, runs: u32) -> Self {
        self.faults.accept(number_of_runs(runs));
        self.settings.max_concurrent_runs_in.insert(Key::checked(group, &mut self.faults), runs);
        self
    }

    /// Sets the build of the application, such as a version or a commit: empty by default. It is
    /// shown with the instance, and never compared. It has at most 64 characters, none of them a
    /// control character.
    pub fn build(mut self, build: &str) -> Self {
        if build.chars().count() > 64 || build.chars().any(char::is_control) {
            let value = format!("{:?}", build.chars().take(80).collect::<String>());
            let rule = "it has to have at most 64 characters, and no control characters";
            self.faults.add(Invalid::setting("a build", value, rule));
        }
        build.clone_into(&mut self.settings.build);
        self
    }

    /// Declares that a schedule was removed from the application.
    ///
    /// Older instances that still have it stop running it once this one has been there for a few
    /// beats, and it is shown as removed. Without this declaration, an older instance that declares
    /// the schedule runs it.
    pub fn removed(mut self, name: &str) -> Self {
        self.removed.push(Key::checked(name, &mut self.faults));
        self
    }

    /// Sets the lock that takes the keys of schedules that are
    /// [exclusive with one](Schedule::exclusive_with), for keys that are to have other terms than
    /// the schedules: another lease, the order of arrival, or
    /// [`article_clients`](crate::leases::LeaseLockBuilder::article_clients). One with the default
    /// lease of 30 seconds takes a key for the lease of the run.
    ///
    /// It is built on the pool of the schedules. It may have neither a minimum interval, which
    /// would refuse retries and ticks, nor [`Rules::Article`], under which a failed run would block
    /// all later ones.
    pub fn lock(mut self, lock: LeaseLock<DB>) -> Self {
        let terms = &lock.key_terms.terms;
        let mut refuse =
            |value: &str, rule: &str| self.faults.add(Invalid::setting("a lock for schedules", value, rule));
        if !Arc::ptr_eq(&lock.pool().connect_options(), &self.settings.requests.application().connect_options()) {
            refuse("another pool", "it has to be built on the pool of the schedules");
        }
        if !terms.min_interval.is_zero() {
            refuse("a minimum interval", "a schedule's distances are those of its ticks");
        }
        if terms.rules == Rules::Article {
            refuse("Rules::Article", "a run that fails would block all later ones until an operator acts");
        }
        self.faults.accept(lock.check());
        self.settings.lock = Some(lock);
        self
    }

    /// Takes the place of an instance of this process, as when a program has read its schedules
    /// again: the runs that it still has count among those that this one may have at the same time,
    /// in all and of each group. It is shut down when this one has been started.
    ///
    /// # Examples
    /// ```
    /// # async fn example<DB: rowlock::Database>(
    /// #     jobs: rowlock::Schedules<DB>,
    /// #     running: rowlock::jobs::Running,
    /// # ) -> Result<(), rowlock::Error> {
    /// let others = jobs.in_place_of(&running).start().await?;
    /// running.shutdown(std::time::Duration::MAX).await;
    /// # drop(others);
    /// # Ok(())
    /// # }
    /// ```
    pub fn in_place_of(mut self, running: &Running) -> Self {
        self.busy = Some(running.busy.clone());
        self
    }

    /// Sends all statements over the application's pool. By default, schedules share the
    /// sessions that locks open for themselves; see
    /// [`LeaseLockBuilder::share_pool`](crate::leases::LeaseLockBuilder::share_pool).
    pub fn share_pool(mut self) -> Self {
        self.settings.requests.share_pool();
        self
    }

    /// Registers the schedules, and begins to run their ticks on this runtime.
    ///
    /// A schedule that has a row already keeps its slot, so an instance that starts loses no tick.
    /// What was due stays due under other times too.
    ///
    /// The instance announces which times it declares, and beats. If instances declare different
    /// times for one schedule, as during a deploy, **the newest times that a living instance
    /// declares are in effect**, and only instances that declare them run the schedule. Times are
    /// as old as the moment at which they first took effect, so an old instance that restarts takes
    /// nothing back. When the last instance with the newest times is gone, the ones before are in
    /// effect again: a rollback needs nothing. Other times apply at once if no other instance
    /// contests them, and otherwise after its fourth beat. A beat comes every three poll intervals,
    /// from 0.3 to 20 s. An instance counts as gone when it is shut down, or has missed four beats.
    ///
    /// # Errors
    /// [`Error::Invalid`] with all faults of these settings, of the schedules and of their names,
    /// or outside a tokio runtime; [`Error::Setup`] if the tables of schedules are missing, or that
    /// of locks for a schedule that is exclusive with a key; [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, some of the schedules may be registered. The call can be repeated.
    pub async fn start(&self) -> Result<Running, Error> {
        let core = self.checked(&self.jobs).await?;
        let declared = self.jobs.iter().flat_map(|job| Declared::all_of(&job.schedule));
        let removed = self.removed.iter().cloned().map(Declared::removed);
        let mut presence = Presence::new(&core, declared.chain(removed).collect());
        if let Err(error) = presence.join(&core).await {
            // Others may have seen it.
            threads::spawn(async move { drop(presence.leave(&core, &CancellationToken::new()).await) });
            return Err(error);
        }
        let jobs = self.jobs.iter().map(|job| (job.schedule.name.clone(), job.clone())).collect();
        Ok(Running::start(core, jobs, presence, self.busy.clone().unwrap_or_default()))
    }

    /// Checks what these jobs need, and returns what their runs share.
    pub(super) async fn checked(&self, jobs: &[Job<DB>]) -> Result<Arc<Core<DB>>, Error> {
        let no_runtime = "jobs run on the tokio runtime from which they are started: call it from within one";
        Handle::try_current().map_err(|_| Invalid::new(no_runtime))?;
        self.check()?;
        let keys: Vec<Key> = jobs.iter().filter_map(|job| job.schedule.exclusive.clone()).collect();
        let mut core = self.settings.clone();
        if !keys.is_empty() {
            let lock = core.lock_of_keys()?;
            lock.check_admits(keys).await?;
            core.lock = Some(lock);
        }
        core.check().await?;
        Ok(Arc::new(core))
    }

    /// Checks the settings, the schedules and their names. Nothing is sent. [`start`](Self::start)
    /// and the calls that run one tick check them too. The calls of operators check the settings of
    /// the instance.
    ///
    /// # Errors
    /// [`Invalid`] with all faults of the names and settings.
    pub fn check(&self) -> Result<(), Invalid> {
        let mut faults = self.faults.clone();
        for Job { schedule, .. } in &self.jobs {
            let of = |fault: Invalid| fault.of(format_args!("the schedule {:?}", schedule.name()));
            faults.accept(schedule.check().map_err(of));
            if schedule.group.as_ref().is_some_and(|group| !self.settings.max_concurrent_runs_in.contains_key(group)) {
                faults.add(of(Invalid::new("its group has no limit: set one with Schedules::max_concurrent_runs_in")));
            }
        }
        if self.jobs.len() > MAX_SCHEDULES {
            let setting = "a number of schedules";
            faults.add(Invalid::setting(setting, self.jobs.len(), "it has to be at most 10,000"));
        }
        let mut names = BTreeSet::new();
        let added =
            self.jobs.iter().flat_map(|job| std::iter::once(&job.schedule.name).chain(&job.schedule.renamed_from));
        for name in added.chain(&self.removed).filter(|name| !names.insert(*name)) {
            let wrong = "it is declared more than once: added, renamed or removed";
            faults.add(Invalid::new(wrong).of(format_args!("the schedule {:?}", name.as_str())));
        }
        let groups: BTreeSet<&Key> = self.jobs.iter().filter_map(|job| job.schedule.group.as_ref()).collect();
        for group in self.settings.max_concurrent_runs_in.keys().filter(|group| !groups.contains(group)) {
            faults.add(Invalid::setting("a group with a limit", group, "no schedule is in it"));
        }
        faults.check()
    }

    /// Returns what the operations for operators need.
    pub(super) fn core(&self) -> Result<Arc<Core<DB>>, Error> {
        self.faults.check()?;
        Ok(Arc::new(self.settings.clone()))
    }
}

/// Validates a limit of runs.
fn number_of_runs(runs: u32) -> Result<(), Invalid> {
    match (1..=10_000).contains(&runs) {
        true => Ok(()),
        false => Err(Invalid::setting("a number of concurrent runs", runs, "it has to be from 1 to 10,000")),
    }
}

impl<DB: Database> Clone for Schedules<DB> {
    fn clone(&self) -> Self {
        let (settings, removed, busy) = (self.settings.clone(), self.removed.clone(), self.busy.clone());
        Self { settings, removed, busy, jobs: self.jobs.clone(), faults: self.faults.clone() }
    }
}

impl<DB: Database> fmt::Debug for Schedules<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.jobs.iter().map(|job| job.schedule.name()).collect();
        f.debug_struct("Schedules").field("database", &DB::NAME).field("names", &names).finish_non_exhaustive()
    }
}
