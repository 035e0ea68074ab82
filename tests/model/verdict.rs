//! The code's own judgement of a row whose claims are renewed, released and taken over by lease.

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::Holder,
    rules::{self, Terms, Verdict},
};

/// How long a claim lasts, in ticks of the clock.
pub const LEASE: i64 = 1;

fn at(tick: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::minutes(tick)
}

/// Judges a row with this claim, if any, for a client that wants it.
pub fn verdict(claim: Option<u8>, expires_at: i64, now: i64, client: u8) -> Verdict {
    let terms = Terms { lease: TimeDelta::minutes(LEASE), ..Terms::default() };
    let held = claim.is_some();
    let row = rules::Row {
        locked: held,
        status: if held { "P" } else { "S" }.into(),
        begin_time: Some(at(0)),
        minutes: Some(LEASE),
        client_ip: String::new(),
        holder: claim.map(|holder| *Holder::of(holder).as_uuid()),
        token: 0,
        expires_at: held.then(|| at(expires_at)),
        claimed_at: held.then(|| at(0)),
        ended: !held,
        awaited: false,
    };
    rules::judge(Some(&row), at(now), Holder::of(client), &terms)
}
