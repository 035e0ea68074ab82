//! The lock table, whose rows are judged by the code's own rules.

use std::time::Duration;

use chrono::TimeDelta;

use crate::{
    events::{Time, clock},
    key::Holder,
    rules::{Row, Terms, Verdict, judge},
};

pub struct Table {
    rows: Vec<Row>,
    /// Until when the grant of each row is not committed: others that judge it grantable skip it.
    uncommitted: Vec<Time>,
    terms: Terms,
}

/// The reply to a claim.
#[derive(Clone, Copy, Debug)]
pub enum ClaimReply {
    Granted,
    Refused {
        /// How long the claim of the holder still stands.
        ends_in: Duration,
        /// When that claim was made.
        since: i64,
        awaited: bool,
    },
    /// Another transaction has the row locked.
    Busy,
}

fn free() -> Row {
    Row {
        locked: false,
        status: "S".to_owned(),
        begin_time: None,
        minutes: None,
        client_ip: String::new(),
        holder: None,
        token: 0,
        expires_at: None,
        claimed_at: None,
        ended: false,
        awaited: false,
    }
}

impl Table {
    pub fn new(keys: usize, lease: Duration) -> Self {
        let terms = Terms { lease: TimeDelta::from_std(lease).unwrap(), ..Terms::default() };
        Self { rows: vec![free(); keys], uncommitted: vec![0; keys], terms }
    }

    /// Judges a claim, and writes it if it is granted. Returns whether it needed a statement more
    /// where one statement only grants free rows.
    pub fn claim(&mut self, key: usize, holder: Holder, waited: bool, now: Time, committed: Time) -> ClaimReply {
        let (row, at) = (&mut self.rows[key], clock(now));
        match judge(Some(row), at, holder, &self.terms) {
            Verdict::Refuse(..) if now < self.uncommitted[key] => ClaimReply::Busy,
            Verdict::Refuse(_, until) => ClaimReply::Refused {
                ends_in: until.and_then(|until| (until - at).to_std().ok()).unwrap_or(Duration::MAX),
                since: row.begin_time.map_or(0, |since| since.timestamp_micros()),
                awaited: row.awaited,
            },
            _ => {
                (row.locked, row.holder, row.ended) = (true, Some(*holder.as_uuid()), false);
                (row.begin_time, row.claimed_at) = (Some(at), Some(at));
                row.expires_at = Some(at + self.terms.lease);
                row.awaited &= waited;
                row.token += 1;
                self.uncommitted[key] = committed;
                ClaimReply::Granted
            }
        }
    }

    fn is_of(&self, key: usize, holder: Holder) -> bool {
        self.rows[key].is_rowlocks() && self.rows[key].holder == Some(*holder.as_uuid())
    }

    /// Returns whether the claim stands, and makes it end after a whole lease.
    pub fn renew(&mut self, key: usize, holder: Holder, now: Time) -> bool {
        let stands = self.is_of(key, holder);
        if stands {
            self.rows[key].expires_at = Some(clock(now) + self.terms.lease);
        }
        stands
    }

    /// Frees the row, if the claim stands. Returns whether waiters are to be notified.
    pub fn release(&mut self, key: usize, holder: Holder) -> bool {
        let stands = self.is_of(key, holder);
        if stands {
            (self.rows[key].locked, self.rows[key].holder, self.rows[key].ended) = (false, None, true);
        }
        stands && self.rows[key].awaited
    }

    /// Requests the notification of a release. Returns whether the row is free.
    pub fn request_notification(&mut self, key: usize) -> bool {
        self.rows[key].awaited |= self.rows[key].locked;
        !self.rows[key].locked
    }
}
