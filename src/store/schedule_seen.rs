//! The claim of what is due, for databases that look first, and then claim the rows that they have
//! seen, the earliest first.

use std::{
    collections::{BTreeMap, HashSet},
    future::Future,
};

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    store::{
        Reply, TooLate, changed, is_undone,
        schedule::{ClaimedRow, DueReply, DueRequest, ScheduleStore, Times, may_be_of_one, times},
        stored_row::StoredRow,
    },
};

/// A row as the look found it.
pub struct Seen {
    pub times: Times,
    pub slot: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    pub triggered_at: Option<DateTime<Utc>>,
    pub run_slot: Option<DateTime<Utc>>,
    pub attempt: u32,
    pub missed: u32,
    pub running: bool,
    pub token: i64,
    pub label: String,
    pub begin_time: Option<DateTime<Utc>>,
    skip: Option<(DateTime<Utc>, DateTime<Utc>)>,
    stop_slot: Option<DateTime<Utc>>,
    pub now: DateTime<Utc>,
}

impl Seen {
    pub fn read(row: &impl StoredRow) -> Reply<Self> {
        Ok(Self {
            times: times(row)?,
            slot: row.time("slot")?,
            due_at: row.time("due_at")?,
            triggered_at: row.time_or_null("triggered_at")?,
            run_slot: row.time_or_null("run_slot")?,
            attempt: row.count("attempt")?,
            missed: row.count("missed")?,
            running: row.is("running")?,
            token: row.number("token")?,
            label: row.text("client_ip")?,
            begin_time: row.time_or_null("begin_time")?,
            skip: Option::zip(row.time_or_null("skip_since")?, row.time_or_null("skip_until")?),
            stop_slot: row.time_or_null("stop_slot")?,
            now: row.time("now")?,
        })
    }

    /// The slot of a claim: that of the attempts so far, or that of the next run.
    pub fn to_run(&self) -> DateTime<Utc> {
        let next = self.triggered_at.unwrap_or(self.slot);
        if self.attempt > 0 { self.run_slot.unwrap_or(next) } else { next }
    }

    /// How long from now until the row is due.
    pub fn left(&self) -> TimeDelta {
        self.due_at - self.now
    }

    /// What tells the row from one that a claim or an order has changed since.
    fn version(&self) -> (Key, i64, DateTime<Utc>, Option<DateTime<Utc>>) {
        (self.times.name.clone(), self.token, self.due_at, self.triggered_at)
    }

    /// The token of a claim.
    pub fn next_token(&self) -> i64 {
        self.token.saturating_add(1).max(self.now.timestamp_micros())
    }

    /// When the run began that a claim takes over.
    pub fn began(&self) -> DateTime<Utc> {
        self.begin_time.unwrap_or(self.now)
    }

    /// The row as a claim leaves it.
    fn claimed(&self, holder: Holder) -> ClaimedRow {
        let lost = || PreviousClaim { token: Token::new(self.token), label: self.label.clone() };
        ClaimedRow {
            claim: Claim { key: self.times.name.clone(), holder, token: Token::new(self.next_token()) },
            slot: self.to_run(),
            own: self.to_run() == self.slot,
            attempt: self.attempt + 1,
            missed: self.missed,
            lost: self.running.then(lost),
            lost_since: self.running.then(|| self.began()),
            skip: self.skip,
            stopped: self.stop_slot == Some(self.to_run()),
            now: self.now,
        }
    }
}

/// How many rows a look reads: more than a claim wants, because others may have locked some.
pub const SEEN: u32 = 32;

/// The statements of a claim, for databases that look first.
pub trait SeenStore: ScheduleStore {
    /// Reads the known schedules that are due first, at most [`SEEN`].
    fn look_for_due(conn: &mut Self::Connection, ask: &DueRequest<'_>)
    -> impl Future<Output = Reply<Vec<Seen>>> + Send;

    /// Claims those rows that are as they were seen, and under which nothing ran, for this lease.
    /// Returns for each whether it was claimed. An error that is undone has claimed none.
    fn take_free(
        conn: &mut Self::Connection,
        ask: &DueRequest<'_>,
        rows: &[&Seen],
        lease: TimeDelta,
    ) -> impl Future<Output = Reply<Vec<bool>>> + Send;

    /// Records that the run of a row was lost, as it was seen.
    fn record_lost(conn: &mut Self::Connection, seen: &Seen) -> impl Future<Output = Reply<()>> + Send;

    /// Claims a row whose run was lost, if it is as it was seen, and records that in the same
    /// transaction.
    fn take_over(
        conn: &mut Self::Connection,
        ask: &DueRequest<'_>,
        seen: &Seen,
    ) -> impl Future<Output = Reply<bool>> + Send {
        changed::<Self>(conn, async move |conn: &mut Self::Connection| {
            if Self::take_free(conn, ask, &[seen], ask.lease_of(&seen.times.name)).await? != [true] {
                return Ok(false);
            }
            Self::record_lost(conn, seen).await.map(|()| true)
        })
    }
}

/// Claims the earliest of what is due, up to as many as are asked for. If none of them could be
/// claimed, because they are locked, refused, or claimed by other instances by now, it looks again
/// and claims others: any of them, because other instances claim the earliest too.
pub async fn claim_due<DB: SeenStore>(conn: &mut DB::Connection, ask: &DueRequest<'_>) -> Reply<DueReply> {
    let (mut reply, mut tried) = (DueReply::default(), HashSet::new());
    loop {
        let seen = DB::look_for_due(conn, ask).await?;
        let (due, later) = seen.split_at(seen.partition_point(|seen| seen.left() <= TimeDelta::zero()));
        let mut next: Vec<&Seen> = due.iter().filter(|seen| !tried.contains(&seen.version())).collect();
        if !tried.is_empty() && next.len() > ask.most as usize {
            let first = fastrand::usize(..=next.len() - ask.most as usize);
            next.rotate_left(first);
        }
        next.truncate(ask.most as usize);
        let (lost, free): (Vec<&Seen>, Vec<&Seen>) = next.iter().partition(|seen| seen.running);
        take_all::<DB>(conn, ask, &free, &mut reply).await?;
        for seen in lost {
            reply.add(ask, seen, DB::take_over(conn, ask, seen).await)?;
        }
        let is_left = |seen: &&Seen| reply.claimed.iter().all(|claimed| claimed.claim.key != seen.times.name);
        reply.next_in = due.iter().find(is_left).or(later.first()).map(Seen::left);
        tried.extend(next.iter().map(|seen| seen.version()));
        // A look finds no more than that.
        if next.is_empty() || !reply.claimed.is_empty() || tried.len() >= SEEN as usize {
            break;
        }
    }
    if let Some(refused) = reply.refused.take_if(|_| reply.claimed.is_empty()) {
        return Err(refused);
    }
    if ask.not_after.is_some() && reply.claims_nothing() {
        reply.too_late = TooLate::at(DB::now(conn).await?, ask.not_after);
    }
    Ok(reply)
}

/// Claims rows under which nothing runs, those with one lease together.
async fn take_all<DB: SeenStore>(
    conn: &mut DB::Connection,
    ask: &DueRequest<'_>,
    free: &[&Seen],
    reply: &mut DueReply,
) -> Reply<()> {
    let mut by_lease: BTreeMap<TimeDelta, Vec<&Seen>> = BTreeMap::new();
    for &seen in free {
        by_lease.entry(ask.lease_of(&seen.times.name)).or_default().push(seen);
    }
    for (lease, rows) in by_lease {
        match DB::take_free(conn, ask, &rows, lease).await {
            Ok(taken) => {
                for (seen, taken) in rows.iter().zip(taken) {
                    reply.add(ask, seen, Ok(taken))?;
                }
            }
            // A trigger may refuse one of them.
            Err(error) if rows.len() > 1 && may_be_of_one(&error) => {
                for seen in rows {
                    let taken = DB::take_free(conn, ask, &[seen], lease).await;
                    reply.add(ask, seen, taken.map(|taken| taken == [true]))?;
                }
            }
            Err(error) => {
                let Some(seen) = rows.first() else { return Err(error) };
                reply.add(ask, seen, Err(error))?;
            }
        }
    }
    Ok(())
}

impl DueRequest<'_> {
    /// Returns the lease of a schedule that was found by its times.
    pub fn lease_of(&self, name: &Key) -> TimeDelta {
        self.known.iter().find(|known| known.times.name == *name).map_or(TimeDelta::zero(), |known| known.lease)
    }
}

impl DueReply {
    fn add(&mut self, ask: &DueRequest<'_>, seen: &Seen, taken: Reply<bool>) -> Reply<()> {
        match taken {
            Ok(true) => self.claimed.push(seen.claimed(ask.holder)),
            Ok(false) => {}
            Err(error) if is_undone(&error) => self.refused = Some(error),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
