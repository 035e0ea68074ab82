//! Counters and histograms through the `metrics` facade, if the feature is enabled.
//! `docs/operating.md` lists their names.

#![cfg_attr(not(feature = "metrics"), allow(unused_variables))]

use std::time::Duration;

use crate::rules::Reason;

macro_rules! count {
    ($name:literal, $by:expr $(, $label:literal => $value:expr)*) => {{
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment($by);
    }};
}

macro_rules! observe {
    ($name:literal, $duration:expr) => {{
        #[cfg(feature = "metrics")]
        metrics::histogram!($name).record($duration.as_secs_f64());
    }};
}

pub fn acquired() {
    count!("rowlock_acquired_total", 1);
}

pub fn refused(reason: Reason) {
    count!("rowlock_refused_total", 1, "reason" => reason.name());
}

/// Records the time from the call of `acquire` to the grant.
pub fn waited(time: Duration) {
    observe!("rowlock_wait_seconds", time);
}

/// Records the time from the grant to the end of the lease, for whatever reason it ended.
pub fn held(time: Duration) {
    observe!("rowlock_hold_seconds", time);
}

/// Counts leases whose renewal in the background received no reply. The leases still stand.
pub fn renewals_failed(leases: usize) {
    count!("rowlock_renewals_failed_total", leases as u64);
}

pub fn lost() {
    count!("rowlock_lost_total", 1);
}

/// Counts an attempt at a transaction or an update that failed because of a conflict.
pub fn conflict() {
    count!("rowlock_conflicts_total", 1);
}
