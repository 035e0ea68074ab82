//! What all runs of one [`Schedules`](crate::Schedules) share: settings, sessions, and how a
//! statement is sent.

use std::{collections::HashMap, sync::Arc, time::Duration};

use chrono::TimeDelta;

use crate::{
    action::{Action, Certainty},
    causes::{NotFound, Setup},
    error::Error,
    key::{Claim, Holder, Key},
    lease::lock::LeaseLock,
    pacing,
    rules::Terms,
    schedule::{declarations::renamed_to, spec::Schedule},
    schema::schema,
    session::{
        sessions::{Purpose, Sessions},
        threads,
        time::Instant,
        timers::{sleep, timeout_at},
    },
    store::{
        Database, Reply, TooLate,
        admin::{Change, recorded},
        failure::Failure,
        instances::{Given, What},
        migration::Part,
        schedule::{DueReply, DueRequest, Known, ListedSchedule},
        schema::TABLES,
    },
    sync::OnDrop,
};

/// Sends a statement that may be sent again, until there is a reply or the limit is reached.
macro_rules! answered {
    ($core:expr, $action:expr, $subject:expr, $conn:ident => $statement:expr) => {{
        let core = $core;
        let limit = core.limit();
        let mut repeat = $crate::retry::Repeat::until(limit);
        let mut outcome = $crate::action::Certainty::NothingChanged;
        let reply = loop {
            let send = async |$conn: &mut _| $statement.await;
            let reply = core.requests.send(limit, send).await;
            if reply.as_ref().is_err_and($crate::store::failure::Failure::is_unanswered) && !$action.leaves_nothing() {
                outcome = $crate::action::Certainty::Unknown;
            }
            if let Some(reply) = repeat.final_or_pause(reply).await {
                break reply;
            }
        };
        reply.map_err(|failure| core.failed(failure, $action, $subject, outcome))
    }};
}

pub(super) use answered;

pub struct Core<DB: Database> {
    pub requests: Sessions<DB>,
    pub label: String,
    /// That of schedules which have none of their own.
    pub default_lease: TimeDelta,
    pub time_limit: Duration,
    /// The longest pause between two looks.
    pub poll_interval: Duration,
    pub max_concurrent_runs: u32,
    /// The most runs of each group.
    pub max_concurrent_runs_in: HashMap<Key, u32>,
    /// The build of the application, for display.
    pub build: String,
    /// Takes the keys of schedules that share one with other programs.
    pub lock: Option<LeaseLock<DB>>,
}

impl<DB: Database> Clone for Core<DB> {
    fn clone(&self) -> Self {
        let (requests, lock, label) = (self.requests.clone(), self.lock.clone(), self.label.clone());
        let (build, max_concurrent_runs_in) = (self.build.clone(), self.max_concurrent_runs_in.clone());
        Self { requests, label, build, lock, max_concurrent_runs_in, ..*self }
    }
}

impl<DB: Database> Core<DB> {
    /// Claims what is due, up to the time limit. The server does not claim later. The reply counts
    /// from the instant at which the request was sent.
    async fn claim_once(&self, known: &[Known], holder: Holder, most: u32) -> Result<(Instant, DueReply), Failure> {
        let limit = self.limit();
        let mut conn = self.requests.take(limit).await?;
        loop {
            let (label, not_after) = (self.label.as_str(), conn.not_after(limit));
            let ask = DueRequest { known, holder, label, most, not_after };
            let sent = Instant::now();
            let reply = timeout_at(limit, DB::claim_due(conn.get(), &ask)).await;
            let (loan, reply) = conn.proceed(reply)?;
            conn = loan;
            match reply.too_late {
                // The server's clock was stepped forward.
                Some(TooLate { now }) if Instant::now() < limit => conn.set_clock(now),
                _ => {
                    conn.give_back();
                    return Ok((sent, reply));
                }
            }
        }
    }

    pub fn limit(&self) -> Instant {
        Instant::now() + self.time_limit
    }

    /// Returns the sessions for renewals, and for the ends of runs.
    pub fn renewals(&self) -> Sessions<DB> {
        self.requests.with_purpose(Purpose::Renewals)
    }

    /// Returns the application's lock for the keys of schedules, or creates one.
    pub fn lock_of_keys(&self) -> Result<LeaseLock<DB>, Error> {
        if let Some(lock) = &self.lock {
            return Ok(lock.clone());
        }
        let builder = LeaseLock::builder(self.requests.application().clone());
        let builder = builder.label(&self.label).time_limit(self.time_limit);
        if self.requests.is_shared() { builder.share_pool().build() } else { builder.build() }
    }

    /// Returns what is left of a lease when it counts as lost: that of a run, or of the key that
    /// the run holds as well, whichever is shorter.
    pub fn reserve(&self, schedule: &Schedule) -> Duration {
        let lease = self.lease(schedule);
        let key = self.lock_of(schedule).map(|lock| lock.key_terms.terms.lease - lock.key_terms.terms.lock_delay);
        pacing::reserve(key.map_or(lease, |key| key.min(lease)).to_std().unwrap_or_default())
    }

    /// Returns the lock that takes the key of a schedule: for the lease of the run, unless the lock
    /// has one of its own.
    pub fn lock_of(&self, schedule: &Schedule) -> Option<LeaseLock<DB>> {
        let lock = self.lock.clone().filter(|_| schedule.exclusive.is_some())?;
        let terms = &lock.key_terms.terms;
        let has_own = terms.lease - terms.lock_delay != Terms::default().lease;
        Some(if has_own { lock } else { lock.lease(self.lease(schedule).to_std().unwrap_or_default()) })
    }

    /// Returns the lease of the runs of a schedule.
    pub fn lease(&self, schedule: &Schedule) -> TimeDelta {
        schedule.lease.unwrap_or(self.default_lease)
    }

    /// Returns what a claim of a schedule needs.
    pub fn known(&self, schedule: &Schedule) -> Known {
        Known { times: schedule.times(), lease: self.lease(schedule) }
    }

    /// Makes a change that an operator has ordered, and records it with what the statements return
    /// as its detail. Returns `false` if they return `None`, and nothing was changed.
    pub async fn change(
        &self,
        action: Action,
        (what, name): (&'static str, &str),
        statements: impl AsyncFnOnce(&mut DB::Connection) -> Reply<Option<String>> + Copy,
    ) -> Result<bool, Error> {
        let (change, subject) = (Change { who: &self.label, what, name }, format!("{name:?}"));
        answered!(self, action, &subject, conn => recorded::<DB>(conn, &change, statements))
    }

    /// Reads the row of a schedule, if there is one.
    pub async fn row(&self, name: &Key) -> Result<Option<ListedSchedule>, Error> {
        let names = std::slice::from_ref(name);
        let rows = answered!(self, Action::Inspect, &name.quoted(), conn => DB::registered(conn, names))?;
        Ok(rows.into_iter().next())
    }

    /// Reads an order that an operator has given for a schedule.
    pub async fn ordered(&self, what: What, name: &Key) -> Result<Option<Given>, Error> {
        answered!(self, Action::Inspect, &name.quoted(), conn => DB::ordered(conn, what, name.as_str()))
    }

    /// Returns the error to report. `before` is what was known of the outcome before this request.
    pub fn failed(&self, failure: Failure, action: Action, subject: &str, before: Certainty) -> Error {
        match failure.into_error(action, subject.to_owned(), self.time_limit, before) {
            Error::Setup(Setup::TableMissing) => Error::Setup(Setup::ScheduleTablesMissing),
            Error::Setup(Setup::ColumnMissing { columns, .. }) => Error::Setup(Setup::ColumnMissing {
                table: "t_resource_schedule, or another one of schedules",
                columns,
            }),
            error => error,
        }
    }

    /// Checks for the tables and a usable server.
    pub async fn check(&self) -> Result<(), Error> {
        let schema = schema(&self.requests, self.limit(), self.time_limit, Part::Schedules).await?;
        let has_tables = TABLES.into_iter().skip(1).all(|table| schema.has(table));
        if has_tables { Ok(()) } else { Err(Error::Setup(Setup::ScheduleTablesMissing)) }
    }

    /// Claims what is due, once. The reply counts from the instant. A claim without a reply, also
    /// because the driver panics or the future is dropped, is undone in the background.
    pub async fn claim(
        self: &Arc<Self>,
        known: &[Known],
        holder: Holder,
        most: u32,
    ) -> Result<(Instant, DueReply), Failure> {
        let undo = OnDrop(|| {
            let core = self.clone();
            let names: Vec<Key> = known.iter().map(|known| known.times.name.clone()).collect();
            // Until its limit, the server may carry the claim out.
            threads::spawn(async move {
                put_back(&core, holder, &names).await;
                sleep(core.time_limit).await;
                put_back(&core, holder, &names).await;
            });
        });
        let reply = self.claim_once(known, holder, most).await;
        if !reply.as_ref().is_err_and(Failure::is_unanswered) {
            std::mem::forget(undo);
        }
        reply
    }
}

/// Says that there is no schedule of this name: its row, if it has one, is of a schedule that is
/// removed, or has another name now.
pub fn not_found(name: &Key, row: Option<&ListedSchedule>) -> Error {
    let renamed_to = row.and_then(|row| renamed_to(&row.times.spec)).map(str::to_owned);
    Error::NotFound(NotFound::Schedule { name: name.clone(), renamed_to })
}

/// Says that the state of a schedule does not permit the call.
pub fn refused(name: &Key, wrong: impl Into<String>) -> Error {
    Error::Setup(Setup::ScheduleUnfit { name: name.clone(), wrong: wrong.into() })
}

/// Undoes the claim of a run whose work was not begun, or hands it back: the row may not be as it
/// was before the claim. Returns `false` if the claim did not stand, or no statement succeeds.
pub async fn undo<DB: Database>(core: &Core<DB>, claim: &Claim) -> bool {
    match put_back(core, claim.holder, std::slice::from_ref(&claim.key)).await {
        Some(false) => hand_back(core, claim).await == Some(true),
        undone => undone.is_some(),
    }
}

/// Undoes a claim of these schedules under which no work was begun. A takeover is left to the next
/// claim. If no statement succeeds, what was claimed is taken over when its lease ends. Returns
/// whether a claim was undone, if that is known.
pub async fn put_back<DB: Database>(core: &Core<DB>, holder: Holder, names: &[Key]) -> Option<bool> {
    let vacant = Holder::unique();
    let done = answered!(core, Action::Abandon, "schedules", conn => DB::put_back(conn, holder, vacant, names));
    let warn = |error: &Error| {
        tracing::warn!(?error, "a claim of schedules was not undone; it ends when its lease ends");
    };
    done.inspect_err(warn).ok()
}

/// Ends a claim of work that has stopped, so that another instance may take over at once. If no
/// statement succeeds, the claim ends with its lease. Returns whether the claim stood, if that is
/// known.
pub async fn hand_back<DB: Database>(core: &Core<DB>, claim: &Claim) -> Option<bool> {
    let vacant = Holder::unique();
    let handed = answered!(core, Action::Abandon, &claim.key.quoted(), conn => DB::hand_back(conn, claim, vacant));
    let warn = |error: &Error| {
        tracing::warn!(schedule = %claim.key, ?error, "the run was not handed back; another instance takes over when its lease ends");
    };
    handed.inspect_err(warn).ok()
}
