//! `try_tick`: one tick, for applications that have a scheduler already.

use std::{future::Future, sync::Arc};

use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::{
    action::{Action, Certainty},
    causes::{NotFound, Setup},
    error::Error,
    key::{Holder, Key},
    retry::Repeat,
    schedule::{
        core::{Core, not_found},
        end::TickOutcome,
        keeper::claim,
        presence::Presence,
        run::{self, Job, StopTokens},
        schedules::Schedules,
    },
    store::{Database, fault::Fault, schedule::Known},
};

impl<DB: Database> Schedules<DB> {
    /// Runs the tick of one schedule if it is due, for applications that have another scheduler.
    /// The call returns when the run has ended.
    ///
    /// All processes that call this with the same times count as one instance, from one tick to
    /// five minutes after the next; see [`start`](Self::start). Times that never were in effect
    /// apply at once.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a name that was not added; otherwise as
    /// [`start`](Self::start).
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is stopped and the tick handed back in the background, so
    /// that another instance can run it at once. If the runtime ends before that, the tick is run
    /// again when its lease ends; [`try_tick_until`](Self::try_tick_until) waits for it.
    pub async fn try_tick(&self, name: &str) -> Result<TickOutcome, Error> {
        self.try_tick_until(name, std::future::pending()).await
    }

    /// Runs the tick of one schedule if it is due, as [`try_tick`](Self::try_tick) does, but only
    /// until `stop` completes. The work is then dropped, and the call ends when the tick has been
    /// handed back: [`TickOutcome::HandedBack`].
    ///
    /// # Errors
    /// As [`try_tick`](Self::try_tick).
    ///
    /// # Cancel safety
    /// As [`try_tick`](Self::try_tick).
    pub async fn try_tick_until(&self, name: &str, stop: impl Future<Output = ()>) -> Result<TickOutcome, Error> {
        self.one_tick(name, false, stop).await
    }

    /// Runs one schedule once, now, beside its ticks, and returns how the run ended: as a
    /// [trigger](Self::trigger) does, but in this call. It is meant for tests of a job, and for a
    /// command that runs one by hand.
    ///
    /// If a failed tick waits for its next attempt, that is made, and the run that was asked for
    /// follows it, on an instance or in another call. [`TickOutcome::NotDue`] says that the
    /// schedule is paused, and is run once when it is resumed, or that another instance runs it.
    /// That instance may have taken this trigger. The process counts as an instance with its times
    /// until shortly after the call.
    ///
    /// # Errors
    /// As [`try_tick`](Self::try_tick).
    ///
    /// # Cancel safety
    /// As [`try_tick`](Self::try_tick). The run may have been asked for.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use rowlock::{Schedule, Schedules, Tick, jobs::TickOutcome};
    ///
    /// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// rowlock::migrate(&pool).await?;
    /// let nightly = Schedule::cron("nightly", "30 2 * * *");
    /// let jobs = Schedules::new(pool).on(nightly, async |tick: Tick<_>| {
    ///     assert!(tick.is_triggered());
    ///     Ok::<_, std::io::Error>(())
    /// });
    /// assert_eq!(jobs.run_now("nightly").await?, TickOutcome::Succeeded);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_now(&self, name: &str) -> Result<TickOutcome, Error> {
        self.one_tick(name, true, std::future::pending()).await
    }

    /// Runs the tick of a schedule if it is due, or is made so by a trigger.
    async fn one_tick(&self, name: &str, triggers: bool, stop: impl Future<Output = ()>) -> Result<TickOutcome, Error> {
        let Some(job) = self.jobs.iter().find(|job| job.schedule.name() == name).cloned() else {
            return Err(not_found(&Key::new(name)?, None));
        };
        let core = self.checked(std::slice::from_ref(&job)).await?;
        let mut presence = Presence::of_calls(&core, &job.schedule, !triggers);
        presence.join(&core).await?;
        let known = core.known(&job.schedule);
        if triggers {
            match self.trigger(name).await {
                // A schedule whose name it had still runs.
                Err(Error::NotFound(NotFound::Schedule { .. })) => {
                    return Ok(TickOutcome::NotDue { retry_after: None });
                }
                triggered => triggered?,
            }
        }
        let stopped = CancellationToken::new();
        let _stop_if_dropped = stopped.clone().drop_guard();
        let mut run = tokio::spawn(tick(core, job, known, stopped.clone()).in_current_span());
        let ended = tokio::select! {
            biased;
            ended = &mut run => ended,
            () = stop => {
                stopped.cancel();
                run.await
            }
        };
        match ended {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime was shut down while the tick was run.
            Err(_) => Err(Setup::RuntimeOver.into()),
        }
    }
}

/// Claims the tick of one schedule, and runs it.
async fn tick<DB: Database>(
    core: Arc<Core<DB>>,
    job: Job<DB>,
    known: Known,
    stopped: CancellationToken,
) -> Result<TickOutcome, Error> {
    let mut repeat = Repeat::until(core.limit());
    let reply = loop {
        let reply = claim(&core, std::slice::from_ref(&known), Holder::unique(), 1).await;
        // Other instances claim at the same moment. A claim without a reply is undone, and
        // reported.
        if stopped.is_cancelled() || !reply.as_ref().is_err_and(|failure| failure.fault() == Fault::Contention) {
            break reply;
        }
        if let Some(reply) = repeat.final_or_pause(reply).await {
            break reply;
        }
    };
    let subject = job.schedule.name.quoted();
    let (claimed, reply) =
        reply.map_err(|failure| core.failed(failure, Action::Acquire, &subject, Certainty::NothingChanged))?;
    let Some(claimed) = claimed.into_iter().next() else {
        let retry_after = reply.next_in.map(|next| next.to_std().unwrap_or_default());
        return Ok(TickOutcome::NotDue { retry_after });
    };
    let tokens = StopTokens { closed: stopped.clone(), stopped };
    Ok(run::run(core, job, claimed, tokens).await.0)
}
