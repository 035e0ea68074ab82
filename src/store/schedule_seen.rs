//! The claim of what is due, for databases that look first, and then claim the rows that they have
//! seen, the earliest first.

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::{Key, Token},
    store::{
        Reply,
        fault::said,
        is_undone,
        schedule::{ClaimedRow, DueReply, DueRequest, LostRun, Times},
        schedule_row::times,
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

    /// The token of a claim.
    pub fn next_token(&self) -> i64 {
        self.token.saturating_add(1).max(self.now.timestamp_micros())
    }

    /// When the run began that a claim takes over.
    pub fn began(&self) -> DateTime<Utc> {
        self.begin_time.unwrap_or(self.now)
    }

    /// The row as a claim leaves it.
    pub fn claimed(&self) -> ClaimedRow {
        let label = || self.label.clone();
        let lost = || LostRun { token: Token::new(self.token), label: label(), begin_time: self.began() };
        ClaimedRow {
            token: Token::new(self.next_token()),
            attempt: self.attempt + 1,
            ..self.held(self.running.then(lost), self.now)
        }
    }

    /// The row as the holder has it already since `now`, after it took over the run that was
    /// lost.
    pub fn held(&self, lost: Option<LostRun>, now: DateTime<Utc>) -> ClaimedRow {
        ClaimedRow {
            name: self.times.name.clone(),
            token: Token::new(self.token),
            slot: self.to_run(),
            own: self.to_run() == self.slot,
            attempt: self.attempt,
            missed: self.missed,
            lost,
            skip: self.skip,
            stopped: self.stop_slot == Some(self.to_run()),
            now,
        }
    }
}

/// Reads the run that a claim took over.
pub fn lost_run(row: &impl StoredRow) -> Reply<LostRun> {
    Ok(LostRun {
        token: Token::new(row.number("token")?),
        label: row.text("client_ip")?,
        begin_time: row.time("begin_time")?,
    })
}

impl DueRequest<'_> {
    /// Returns the lease of a schedule that was found by its times.
    pub fn lease_of(&self, name: &Key) -> TimeDelta {
        self.known.iter().find(|known| known.times.name == *name).map_or(TimeDelta::zero(), |known| known.lease)
    }
}

impl DueReply {
    pub fn nothing() -> Self {
        Self { claimed: Vec::new(), next_in: None, too_late: None }
    }

    /// Returns whether the reply has this schedule already.
    pub fn has(&self, name: &Key) -> bool {
        self.claimed.iter().any(|row| row.name == *name)
    }

    /// Returns whether a row that is due in `left` is to be claimed, besides as many others.
    /// Otherwise it is the next one.
    pub fn wants(&mut self, left: TimeDelta, most: u32, others: usize) -> bool {
        let claimed = u32::try_from(self.claimed.len() + others);
        let wants = left <= TimeDelta::zero() && claimed.is_ok_and(|claimed| claimed < most);
        if !wants {
            self.next_in = Some(self.next_in.map_or(left, |next| next.min(left)));
        }
        wants
    }

    /// Adds the reply to the claim of a row that is due in `left`. Returns whether to go on.
    pub fn add(&mut self, left: TimeDelta, reply: Reply<Option<ClaimedRow>>) -> Reply<bool> {
        match reply {
            Ok(Some(claimed)) => self.claimed.push(claimed),
            Ok(None) => self.next_in = Some(left),
            // Those before were granted, and are run.
            Err(error) if !self.claimed.is_empty() && is_undone(&error) => {
                let error = said(&error);
                tracing::warn!(error, "a schedule could not be claimed; trying again");
                self.next_in = Some(left);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}
