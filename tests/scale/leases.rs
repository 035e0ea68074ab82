//! How an instance renews what it holds: many leases in one statement, at the times that the code
//! computes (`src/lease/renewer.rs`, `src/session/exchange.rs`).

use std::time::Duration;

use crate::{
    events::{Time, micros},
    key::Holder,
    locks::{Locks, Statement, Timer},
    net::{Instance, Net, Purpose},
    pacing,
};

/// A lease.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub task: usize,
    pub key: usize,
    holder: Holder,
    renew_at: Time,
    deadline: Time,
}

impl Held {
    /// A lease that was granted to a request sent at `sent`.
    pub fn new(task: usize, key: usize, holder: Holder, sent: Time, lease: Duration) -> Self {
        Self::renewed(task, key, holder, sent, (lease, pacing::renewal_interval(lease)))
    }

    fn renewed(task: usize, key: usize, holder: Holder, sent: Time, (lease, next): (Duration, Duration)) -> Self {
        let renew_at = sent + micros(next);
        Self { task, key, holder, renew_at, deadline: sent + micros(pacing::trusted(lease, lease)) }
    }
}

/// A renewal in flight, on one connection or on two.
pub struct Renewal {
    number: u64,
    claims: Vec<(usize, usize, Holder)>,
    limit: Time,
    unanswered: usize,
    failed: usize,
}

impl Locks {
    pub fn hold(&mut self, net: &mut Net<Self>, held: Held, instance: Instance) {
        self.processes[instance].held.push(held);
        self.set_renew_timer(net, instance);
    }

    /// Sets the timer to when a lease is due, or lost.
    fn set_renew_timer(&mut self, net: &mut Net<Self>, instance: Instance) {
        let process = &mut self.processes[instance];
        let renewing = process.renewal.is_some();
        let due = |held: &Held| if renewing { held.deadline } else { held.renew_at.min(held.deadline) };
        let Some(next) = process.held.iter().map(due).min() else { return };
        process.renew_timer += 1;
        net.timer(next, Timer::Renew(instance, process.renew_timer));
    }

    /// Reports the leases that are lost, and starts a renewal if one is due.
    pub fn renew_timer(&mut self, net: &mut Net<Self>, instance: Instance, number: u32) {
        if self.processes[instance].renew_timer != number {
            return;
        }
        let now = net.now();
        let late: Vec<Held> = self.processes[instance].held.extract_if(.., |held| held.deadline <= now).collect();
        for held in late {
            self.lost(net, instance, held);
        }
        let process = &mut self.processes[instance];
        if process.renewal.is_none() && process.held.iter().any(|held| held.renew_at <= now) {
            let joins = now + micros(pacing::joins_within(self.work.lease));
            let due = process.held.iter().filter(|held| held.renew_at <= joins).take(net.constants.renewed);
            let claims = due.map(|held| (held.task, held.key, held.holder)).collect();
            let limit = now + micros(pacing::attempt(self.work.lease));
            process.renewals += 1;
            let number = process.renewals;
            process.renewal = Some(Renewal { number, claims, limit, unanswered: 0, failed: 0 });
            self.send_renewal(net, instance);
            net.timer(now + micros(pacing::hedge_delay(self.work.lease)), Timer::Hedge(instance, number));
        }
        self.set_renew_timer(net, instance);
    }

    fn send_renewal(&mut self, net: &mut Net<Self>, instance: Instance) {
        let Some(renewal) = &mut self.processes[instance].renewal else { return };
        renewal.unanswered += 1;
        let statement = Statement::Renew(renewal.number, renewal.claims.clone());
        net.send(instance, Purpose::Renewals, statement, renewal.limit);
    }

    /// Sends a renewal without a reply on a second connection.
    pub fn hedge(&mut self, net: &mut Net<Self>, instance: Instance, number: u64) {
        if self.processes[instance].renewal.as_ref().is_some_and(|renewal| renewal.number == number) {
            self.send_renewal(net, instance);
        }
    }

    pub fn on_renewed(&mut self, net: &mut Net<Self>, sent: (Instance, Time), number: u64, stand: &[bool]) {
        let (instance, at) = sent;
        let process = &mut self.processes[instance];
        let Some(renewal) = process.renewal.take_if(|renewal| renewal.number == number) else { return };
        let lease = self.work.lease;
        let next = pacing::renewal_interval(lease);
        let mut lost = Vec::new();
        for ((task, key, holder), stands) in renewal.claims.into_iter().zip(stand) {
            let Some(place) = process.held.iter().position(|held| held.holder == holder) else { continue };
            net.figures.renewed += 1;
            if *stands {
                process.held[place] = Held::renewed(task, key, holder, at, (lease, next));
                self.relied[key] = Some((instance, process.held[place].deadline));
            } else {
                lost.push(process.held.swap_remove(place));
            }
        }
        for held in lost {
            self.lost(net, instance, held);
        }
        self.set_renew_timer(net, instance);
    }

    /// Without a reply on any connection, the renewal is sent again after a pause.
    pub fn on_renewal_failed(&mut self, net: &mut Net<Self>, instance: Instance, number: u64) {
        let process = &mut self.processes[instance];
        let Some(renewal) = process.renewal.as_mut().filter(|renewal| renewal.number == number) else { return };
        renewal.failed += 1;
        if renewal.failed < renewal.unanswered {
            return;
        }
        let soon = net.now() + micros(pacing::renewal_retry(self.work.lease));
        let Some(renewal) = process.renewal.take() else { return };
        for held in &mut process.held {
            if renewal.claims.iter().any(|(_, _, holder)| *holder == held.holder) {
                held.renew_at = soon;
            }
        }
        self.set_renew_timer(net, instance);
    }

    /// The work of a task that lost its lease begins anew.
    fn lost(&mut self, net: &mut Net<Self>, instance: Instance, held: Held) {
        net.figures.lost += 1;
        if self.relied[held.key].is_some_and(|(holder, _)| holder == instance) {
            self.relied[held.key] = None;
        }
        self.wait(net, instance, held.task);
    }
}
