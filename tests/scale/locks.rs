//! Instances that wait for keys of the lock table, hold them, and release them
//! (`src/lease/wait.rs`). `claims.rs` sends their claims, `leases.rs` renews what they hold,
//! `notifications.rs` tells them of releases.

use std::{collections::VecDeque, time::Duration};

use crate::{
    claims::Request,
    events::{SECOND, Time, duration, micros},
    key::Holder,
    leases::{Held, Renewal},
    net::{Failure, Instance, Net, Purpose},
    pacing::{self, Backoff},
    position::Position,
    rows::{ClaimReply, Table},
    tickets::Queues,
};

/// What the instances do.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub lease: Duration,
    /// How long a task holds its key, or for ever.
    pub hold: Option<Time>,
    /// How long it then rests, on average, before it waits again.
    pub rest: Duration,
    /// Instead of a release, the lease is renewed no more, as if its process had died.
    pub dies: bool,
    /// The handles are fair.
    pub fair: bool,
}

#[derive(Clone, Debug)]
pub enum Statement {
    Claim(Vec<Request>),
    Renew(u64, Vec<(usize, usize, Holder)>),
    Release(usize, usize, Holder),
    RequestNotification(usize, usize),
    Listen,
    /// Draws a ticket, for a task and a key.
    Draw(usize, usize),
    /// Reads the front of a queue, up to a number.
    Front(usize, usize, i64),
    Heartbeat(Vec<(usize, i64)>),
    Leave(usize, i64),
}

#[derive(Debug)]
pub enum Reply {
    Claims(Vec<ClaimReply>),
    /// Which of the claims stand.
    Renewed(Vec<bool>),
    /// A free row needs no notification.
    Free(bool),
    Drawn(i64),
    Position(Position),
    Done,
}

#[derive(Debug)]
pub enum Timer {
    Start(Instance),
    Wait(Instance, usize),
    /// The pause of a task is over, unless something ended it before.
    Poll(Instance, usize, u32),
    Notified(Instance, usize),
    /// Ready requests have joined.
    Flush(Instance),
    /// A request may have waited for too long behind a statement.
    OpenWorker(Instance),
    Release(Instance, usize, u32),
    Renew(Instance, u32),
    Hedge(Instance, u64),
    Listen(Instance),
    Heartbeat(Instance),
    Death,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Pausing,
    Claiming,
    Held,
    Releasing,
}

/// A task that wants one key.
pub struct Task {
    pub key: usize,
    pub stage: Stage,
    /// Grows with each change of the stage.
    pub change: u32,
    /// Since when it has waited.
    pub since: Time,
    pub holder: Holder,
    /// A claim of this holder has no reply.
    pub unanswered: bool,
    pub ticket: Option<i64>,
    pub waited: bool,
    /// A notification arrived while a claim was in flight.
    pub notified: bool,
    pub busy_since: Option<Time>,
    pub backoff: Backoff,
    pub failures: Backoff,
    pub last_seen: Option<i64>,
}

#[derive(Default)]
pub struct Process {
    pub tasks: Vec<Task>,
    pub queue: VecDeque<(Time, Request)>,
    pub in_flight: usize,
    pub held: Vec<Held>,
    pub renewal: Option<Renewal>,
    pub renewals: u64,
    /// Grows when the renewer's timer is set anew.
    pub renew_timer: u32,
    /// Whether its connection that listens is open; `None` if it is not wanted, or to be opened.
    pub listening: Option<bool>,
    pub listen_pauses: Option<Backoff>,
    /// The heartbeats for its tickets are sent.
    pub heartbeats: bool,
}

pub struct Locks {
    pub work: Work,
    pub table: Table,
    pub queues: Queues,
    pub processes: Vec<Process>,
    /// The tasks that want each key.
    pub wanted: Vec<Vec<(Instance, usize)>>,
    /// Until when a task relies on each key.
    pub relied: Vec<Option<(Instance, Time)>>,
    pub released: Vec<Option<Time>>,
    died: Vec<Option<Time>>,
    holders: u64,
}

impl Locks {
    /// Creates the tasks: `keys` are the keys that each instance wants.
    pub fn new(work: Work, count: usize, keys: Vec<Vec<usize>>) -> Self {
        let mut wanted = vec![Vec::new(); count];
        let mut holders = 0;
        let mut processes = Vec::with_capacity(keys.len());
        for (instance, keys) in keys.into_iter().enumerate() {
            let tasks = keys.into_iter().enumerate().map(|(index, key)| {
                wanted[key].push((instance, index));
                holders += 1;
                task(key, Holder::of(holders))
            });
            processes.push(Process { tasks: tasks.collect(), ..Process::default() });
        }
        let table = Table::new(count, work.lease);
        let (released, died) = (vec![None; count], vec![None; count]);
        Self {
            work,
            table,
            queues: Queues::default(),
            processes,
            wanted,
            relied: vec![None; count],
            released,
            died,
            holders,
        }
    }

    pub fn task(&mut self, instance: Instance, index: usize) -> &mut Task {
        &mut self.processes[instance].tasks[index]
    }

    /// The task begins to wait for its key.
    pub fn wait(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        self.holders += 1;
        let holder = Holder::of(self.holders);
        let backoff = pacing::poll_backoff(net.server.conditions.database.notifies);
        let task = self.task(instance, index);
        *task = Task { since: net.now(), change: task.change + 1, backoff, ..self::task(task.key, holder) };
        self.request(net, instance, index);
    }

    pub fn pause(&mut self, net: &mut Net<Self>, instance: Instance, index: usize, pause: Duration) {
        let task = self.task(instance, index);
        (task.stage, task.change) = (Stage::Pausing, task.change + 1);
        let change = task.change;
        net.timer(net.now().saturating_add(micros(pause)), Timer::Poll(instance, index, change));
    }

    /// The next request is by a new holder, unless one without a reply may have been granted.
    pub fn poll(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        self.holders += 1;
        let holder = Holder::of(self.holders);
        let task = self.task(instance, index);
        if !task.unanswered {
            task.holder = holder;
        }
        self.request(net, instance, index);
    }

    pub fn on_claim(&mut self, net: &mut Net<Self>, sent: (Instance, Time), index: usize, reply: ClaimReply) {
        let (instance, now) = (sent.0, net.now());
        let (busy, is_fair) = (net.constants.busy, self.work.fair);
        let task = self.task(instance, index);
        (task.unanswered, task.failures) = (false, pacing::retry_backoff());
        match reply {
            ClaimReply::Granted => return self.on_granted(net, sent, index),
            ClaimReply::Busy if !task.waited && now < *task.busy_since.get_or_insert(now) + busy => {
                return self.pause(net, instance, index, Duration::from_millis(fastrand::u64(2..10)));
            }
            _ => {}
        }
        let (ends_in, since, awaited) = match reply {
            ClaimReply::Refused { ends_in, since, awaited } => (ends_in, since, awaited),
            _ => (duration(busy), task.last_seen.unwrap_or_default(), true),
        };
        if is_fair && task.ticket.is_none() {
            return self.draw(net, instance, index);
        }
        self.refused(net, instance, index, ends_in, since);
        if net.server.conditions.database.notifies && !awaited && self.processes[instance].listening == Some(true) {
            let key = self.task(instance, index).key;
            let limit = net.now() + SECOND;
            net.send(instance, Purpose::Requests, Statement::RequestNotification(index, key), limit);
        }
    }

    /// Pauses after a refusal that ends by itself, by a claim or a waiter that `seen` stands for.
    pub fn refused(&mut self, net: &mut Net<Self>, instance: Instance, index: usize, ends_in: Duration, seen: i64) {
        let task = self.task(instance, index);
        if task.last_seen.replace(seen).is_some_and(|before| before != seen) {
            task.backoff = pacing::poll_sooner(task.backoff);
        }
        (task.waited, task.busy_since) = (true, None);
        let pause = pacing::poll_pause(task.backoff.next(), ends_in, Duration::MAX);
        let pause = if std::mem::take(&mut task.notified) { Duration::ZERO } else { pause };
        self.pause(net, instance, index, pause);
        if net.server.conditions.database.notifies {
            self.listen(net, instance);
        }
    }

    /// A claim has no reply, or was not sent.
    pub fn on_claim_failed(&mut self, net: &mut Net<Self>, instance: Instance, index: usize, failure: Failure) {
        let task = self.task(instance, index);
        task.unanswered |= failure != Failure::NoConnection;
        let pause = match failure {
            Failure::Lost => Duration::from_millis(fastrand::u64(20..60)),
            Failure::NoConnection | Failure::NoReply => task.failures.next(),
        };
        self.pause(net, instance, index, pause);
    }

    fn on_granted(&mut self, net: &mut Net<Self>, (instance, sent): (Instance, Time), index: usize) {
        let (now, work) = (net.now(), self.work);
        let task = self.task(instance, index);
        (task.stage, task.change) = (Stage::Held, task.change + 1);
        let (key, since, change, holder) = (task.key, task.since, task.change, task.holder);
        let deadline = sent + micros(pacing::trusted(work.lease, work.lease));
        let figures = &mut net.figures;
        figures.granted += 1;
        figures.waits.push(now - since);
        figures.hand_overs.extend(self.released[key].take().filter(|released| since < *released).map(|at| now - at));
        figures.takeovers.extend(self.died[key].take().map(|died| now - died));
        figures.overlaps +=
            usize::from(self.relied[key].is_some_and(|(other, until)| other != instance && until > now));
        self.relied[key] = Some((instance, deadline));
        self.hold(net, Held::new(index, key, holder, sent, work.lease), instance);
        self.leave(net, instance, index);
        if let Some(hold) = work.hold {
            net.timer(now + hold, Timer::Release(instance, index, change));
        }
    }

    pub fn release(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let task = self.task(instance, index);
        (task.stage, task.change) = (Stage::Releasing, task.change + 1);
        let (key, holder) = (task.key, task.holder);
        self.processes[instance].held.retain(|held| held.task != index);
        self.relied[key] = None;
        if self.work.dies {
            self.died[key] = Some(net.now());
            return self.rest(net, instance, index);
        }
        let limit = net.now() + net.constants.time_limit;
        net.send(instance, Purpose::Requests, Statement::Release(index, key, holder), limit);
    }

    pub fn death(&mut self, net: &mut Net<Self>) {
        let Some((instance, _)) = self.relied[0] else { return };
        net.kill(instance);
        for held in &self.processes[instance].held {
            (self.died[held.key], self.relied[held.key]) = (Some(net.now()), None);
        }
    }
}

fn task(key: usize, holder: Holder) -> Task {
    Task {
        key,
        stage: Stage::Pausing,
        change: 0,
        since: 0,
        holder,
        unanswered: false,
        ticket: None,
        waited: false,
        notified: false,
        busy_since: None,
        backoff: pacing::retry_backoff(),
        failures: pacing::retry_backoff(),
        last_seen: None,
    }
}

impl Locks {
    pub fn is_at(&self, net: &Net<Self>, instance: Instance, index: usize, change: u32) -> bool {
        !net.is_dead(instance) && self.processes[instance].tasks[index].change == change
    }

    /// A task that has released its key waits again after a while.
    pub fn rest(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        self.task(instance, index).change += 1;
        let rest = self.work.rest.mul_f64(0.5 + fastrand::f64());
        net.timer(net.now() + micros(rest), Timer::Wait(instance, index));
    }

    /// Sends an ending again after a pause.
    pub fn release_later(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let change = self.task(instance, index).change;
        let pause = micros(pacing::renewal_retry(self.work.lease));
        net.timer(net.now() + pause, Timer::Release(instance, index, change));
    }
}
