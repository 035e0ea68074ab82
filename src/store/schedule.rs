//! The schedules' operations on a database: read, claim, move, end, and what operators do.
//!
//! A claim is granted on the whole of what was seen of the row (its token, slot, attempt and due
//! time), because an end that arrives late leaves the token as it is. The history has one row for
//! each attempt, and its primary key refuses a second end of one attempt.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    store::{
        Outcome, Reply, Store, TooLate,
        fault::{Fault, fault},
        is_undone, not_extended,
        run_info::{RunInfo, RunOptions},
        stored_row::StoredRow,
    },
};

/// The error that the history records for a run whose process died.
pub const LOST: &str = "taken over: its lease ended";
/// The error that the history records for a run whose work was stopped. Runs that were handed back
/// are counted by this text, so it must stay as older rows have it.
pub const HANDED_BACK: &str = "handed back: its work was stopped";
/// The most rows that one step of deletion takes.
pub const STEP: i64 = 500;

/// The times of a schedule as its row keeps them. A row is claimed by instances that have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    pub name: Key,
    pub spec: String,
    pub zone: String,
}

/// Reads the times of a row.
pub fn times(row: &impl StoredRow) -> Reply<Times> {
    Ok(Times { name: named(&row.text("name")?)?, spec: row.text("spec")?, zone: row.text("zone")? })
}

/// A schedule that an instance runs, and the lease of its runs.
#[derive(Clone, Debug)]
pub struct Known {
    pub times: Times,
    pub lease: TimeDelta,
}

/// A request to claim what is due.
#[derive(Clone, Debug)]
pub struct DueRequest<'a> {
    /// The schedules that this instance knows.
    pub known: &'a [Known],
    pub holder: Holder,
    pub label: &'a str,
    /// The most schedules that are claimed.
    pub most: u32,
    /// After this time on the server's clock nothing is claimed.
    pub not_after: Option<DateTime<Utc>>,
}

/// A schedule that was claimed.
#[derive(Clone, Debug)]
pub struct ClaimedRow {
    pub claim: Claim,
    /// The slot to run: the schedule's own, or the time of a trigger.
    pub slot: DateTime<Utc>,
    /// The slot to run is the row's. Otherwise it is that of a trigger, or of times that were
    /// replaced while it was run.
    pub own: bool,
    pub attempt: u32,
    pub missed: u32,
    /// The previous attempt, if its lease ended, and when it was begun.
    pub lost: Option<PreviousClaim>,
    pub lost_since: Option<DateTime<Utc>>,
    /// An operator has ordered that the ticks from the first of these on are skipped, up to the
    /// second.
    pub skip: Option<(DateTime<Utc>, DateTime<Utc>)>,
    /// An operator has stopped the tick.
    pub stopped: bool,
    /// The time of the claim.
    pub now: DateTime<Utc>,
}

/// What was claimed, and how long from now until another of the known schedules is due.
#[derive(Debug, Default)]
pub struct DueReply {
    pub claimed: Vec<ClaimedRow>,
    pub next_in: Option<TimeDelta>,
    /// Why the server has refused to change another row, if it did.
    pub refused: Option<sqlx::Error>,
    /// Nothing was claimed, because the request was carried out too late.
    pub too_late: Option<TooLate>,
}

impl DueReply {
    /// Returns whether a schedule is due, and none was claimed.
    pub fn claims_nothing(&self) -> bool {
        self.claimed.is_empty() && self.next_in.is_some_and(|left| left <= TimeDelta::zero())
    }
}

/// A move of the slot under a claim, past ticks that are not run themselves.
#[derive(Clone, Debug)]
pub struct Pass<'a> {
    /// The times with which `to` was computed. Of other times the slot is left alone.
    pub times: &'a Times,
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    /// Whether `to` is run under this claim. Otherwise the row is freed.
    pub runs: bool,
    /// How many earlier ticks `to` stands for.
    pub missed: u32,
    /// How many ticks the history records as missed, and why.
    pub skipped: u32,
    pub error: Option<&'a str>,
}

/// The end of a run.
#[derive(Clone, Debug)]
pub struct End<'a> {
    /// The times with which the next slot was computed. Of other times the slot is left alone.
    pub times: &'a Times,
    pub slot: DateTime<Utc>,
    pub attempt: u32,
    pub missed: u32,
    /// `S` or `F`.
    pub status: &'static str,
    pub error: Option<&'a str>,
    /// The next slot; that of a triggered run is left alone. `None`: the tick is run again.
    pub next: Option<DateTime<Utc>>,
    /// The pause before the tick is run again.
    pub pause: TimeDelta,
    /// The end of what the run printed.
    pub output: Option<&'a [u8]>,
}

/// The outcome of a renewal of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extended {
    Is(Outcome),
    /// An operator has stopped the tick. Nothing was extended.
    Stopped,
}

/// A renewal of a run.
#[derive(Clone, Copy, Debug)]
pub struct Extension {
    /// The lease ends this long after now.
    pub lease: TimeDelta,
    /// It is known already that an operator has stopped the tick.
    pub is_stopped: bool,
    /// After this time on the server's clock nothing is extended.
    pub not_after: Option<DateTime<Utc>>,
}

/// Derives the outcome of a renewal that changed nothing from the row of its claim, if that stands.
pub fn unextended(row: Option<&impl StoredRow>, extension: Extension) -> Reply<Extended> {
    let Some(row) = row else { return Ok(Extended::Is(Outcome::Lost)) };
    if !extension.is_stopped && row.is("stopped")? {
        return Ok(Extended::Stopped);
    }
    let left = TimeDelta::microseconds(row.number("left_micros")?);
    Ok(Extended::Is(not_extended(left, row.time("now")?, extension.not_after)))
}

/// A schedule's row, for display.
#[derive(Clone, Debug)]
pub struct ListedSchedule {
    pub times: Times,
    pub slot: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    pub paused: bool,
    /// When the pause ends, if it ends by itself.
    pub paused_until: Option<DateTime<Utc>>,
    /// The first and the last of the ticks that an operator has skipped.
    pub skip: Option<(DateTime<Utc>, DateTime<Utc>)>,
    pub stopped: bool,
    /// What the run says of itself.
    pub note: String,
    pub triggered_at: Option<DateTime<Utc>>,
    pub run_slot: Option<DateTime<Utc>>,
    pub attempt: u32,
    pub missed: u32,
    pub running: bool,
    pub token: Token,
    pub label: String,
    pub begin_time: Option<DateTime<Utc>>,
    /// Hashes of the times that the schedule has had, the newest first.
    pub known: String,
    /// When the present times took effect.
    pub times_at: Option<DateTime<Utc>>,
    /// Since when no instance has the schedule, although its service lives.
    pub gone_at: Option<DateTime<Utc>>,
    pub now: DateTime<Utc>,
}

/// Reads a row for display.
pub fn listed(row: &impl StoredRow) -> Reply<ListedSchedule> {
    let (attempt, run_slot) = (row.count("attempt")?, row.time_or_null("run_slot")?);
    Ok(ListedSchedule {
        times: times(row)?,
        slot: row.time("slot")?,
        due_at: row.time("due_at")?,
        paused: row.is("paused")?,
        paused_until: row.time_or_null("paused_until")?,
        skip: Option::zip(row.time_or_null("skip_since")?, row.time_or_null("skip_until")?),
        stopped: attempt > 0 && run_slot.is_some() && row.time_or_null("stop_slot")? == run_slot,
        note: row.text("note")?,
        triggered_at: row.time_or_null("triggered_at")?,
        run_slot,
        attempt,
        missed: row.count("missed")?,
        running: row.is("running")?,
        token: Token::new(row.number("token")?),
        label: row.text("client_ip")?,
        begin_time: row.time_or_null("begin_time")?,
        known: row.text_or_null("known")?.unwrap_or_default(),
        times_at: row.time_or_null("times_at")?,
        gone_at: row.time_or_null("gone_at")?,
        now: row.time("now")?,
    })
}

#[cfg(test)]
impl ListedSchedule {
    /// Returns a row on which nothing was run yet, as it is read at its slot.
    pub fn unrun(times: Times, slot: DateTime<Utc>) -> Self {
        Self {
            times,
            slot,
            due_at: slot,
            paused: false,
            paused_until: None,
            skip: None,
            stopped: false,
            note: String::new(),
            triggered_at: None,
            run_slot: None,
            attempt: 0,
            missed: 0,
            running: false,
            token: Token::new(1),
            label: String::new(),
            begin_time: None,
            known: String::new(),
            times_at: None,
            gone_at: None,
            now: slot,
        }
    }
}

/// The schedules' operations of a [`Store`].
pub trait ScheduleStore: Store {
    /// Reads the rows of the named schedules. The slice may be empty.
    fn registered(
        conn: &mut Self::Connection,
        names: &[Key],
    ) -> impl Future<Output = Reply<Vec<ListedSchedule>>> + Send;

    /// Claims the known schedules that are due, and records the runs whose lease ended.
    fn claim_due(conn: &mut Self::Connection, ask: &DueRequest<'_>) -> impl Future<Output = Reply<DueReply>> + Send;

    /// Undoes a claim of these schedules under which no work was begun: they are due again, and the
    /// attempt does not count. Returns whether one was undone. The claim of a first attempt stands
    /// whose slot was moved for it, or is one of other times by now.
    ///
    /// If it was a takeover, `vacant` holds the row until the next one. The row shows the run that
    /// was lost again, since its beginning decides which ticks the next claim skips.
    fn put_back(
        conn: &mut Self::Connection,
        holder: Holder,
        vacant: Holder,
        names: &[Key],
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Makes the claim's lease end later. Never waits for a row that another transaction has
    /// locked.
    fn extend_run(
        conn: &mut Self::Connection,
        claim: &Claim,
        extension: Extension,
    ) -> impl Future<Output = Reply<Extended>> + Send;

    /// Ends a claim of work that was stopped: records the run, and makes the row due for a
    /// takeover. The row's holder is `vacant` until then, so the run changes nothing any more.
    /// Returns `false` if the claim does not stand, and was not handed back before.
    fn hand_back(
        conn: &mut Self::Connection,
        claim: &Claim,
        vacant: Holder,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Counts the attempts at a slot that were handed back.
    fn handed_back_runs(
        conn: &mut Self::Connection,
        name: &Key,
        slot: DateTime<Utc>,
    ) -> impl Future<Output = Reply<i64>> + Send;

    /// Moves the slot. Returns `false` if the claim does not stand, or other times are in effect.
    fn skip_ticks(
        conn: &mut Self::Connection,
        claim: &Claim,
        pass: &Pass<'_>,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Ends a run: frees the row and adds the run to the history. Returns `false` if the claim does
    /// not stand. `within`: as a part of the transaction that is open on the connection.
    ///
    /// A triggered run comes after the attempts, and shortens none of their pauses.
    fn end_run(
        conn: &mut Self::Connection,
        claim: &Claim,
        end: &End<'_>,
        within: bool,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Returns whether the history shows that this attempt of the claim has ended with this status.
    /// Changes nothing.
    fn has_ended(
        conn: &mut Self::Connection,
        claim: &Claim,
        slot: DateTime<Utc>,
        attempt: u32,
        status: &'static str,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Pauses a schedule, or resumes it: it is not overdue then. Returns `false` if there is none.
    fn pause(conn: &mut Self::Connection, name: &Key, paused: bool) -> impl Future<Output = Reply<bool>> + Send;

    /// Asks for a run beside the ticks. One that is asked for already stays. A trigger during a
    /// triggered run is followed by another run. Returns `false` if there is no such schedule.
    ///
    /// A trigger has a time of its own: later than the last run, and never that of a slot, which
    /// has whole milliseconds.
    fn trigger(conn: &mut Self::Connection, name: &Key) -> impl Future<Output = Reply<bool>> + Send;

    /// Reads schedules in the order of their names, after `after`.
    fn list_schedules(
        conn: &mut Self::Connection,
        after: &str,
        limit: u32,
    ) -> impl Future<Output = Reply<Vec<ListedSchedule>>> + Send;

    /// Reads the last runs of a schedule, the latest slot first.
    fn history(conn: &mut Self::Connection, name: &Key, limit: u32)
    -> impl Future<Output = Reply<Vec<RunInfo>>> + Send;

    /// Reads the last `each` runs of every schedule, and its last success, in any order. A run may
    /// come twice.
    fn latest_runs(conn: &mut Self::Connection, each: u32) -> impl Future<Output = Reply<Vec<RunInfo>>> + Send;

    /// Reads the runs that are selected, the latest end first.
    fn runs(conn: &mut Self::Connection, options: &RunOptions) -> impl Future<Output = Reply<Vec<RunInfo>>> + Send;

    /// Deletes at most [`STEP`] runs that ended before `older_than`, with what they printed, and
    /// returns their number. The last success of each schedule stays, and so do the attempts at a
    /// tick that goes on.
    fn forget_history(conn: &mut Self::Connection, older_than: TimeDelta) -> impl Future<Output = Reply<u64>> + Send;
}

/// Returns whether a run of this slot was triggered. A trigger has a time of its own, which is
/// never that of a tick: ticks have whole milliseconds. It holds for the whole run, even if another
/// trigger replaces this one in the row.
pub fn is_trigger(slot: DateTime<Utc>) -> bool {
    !slot.timestamp_subsec_micros().is_multiple_of(1_000)
}

/// Converts a count for the tables.
pub fn to_stored_count(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Returns whether a statement of several schedules may have been refused because of one of them.
pub fn may_be_of_one(error: &sqlx::Error) -> bool {
    is_undone(error) && fault(error) != Fault::ReadOnly
}

/// Reads a name that this crate wrote.
pub fn named(text: &str) -> Reply<Key> {
    Key::new(text).map_err(|error| sqlx::Error::Decode(error.into()))
}
