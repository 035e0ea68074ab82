//! Instances that look for ticks and run them (`src/schedule/runner.rs`, `run.rs`, `keeper.rs`).

use std::time::Duration;

use crate::{
    assumptions::Database,
    events::{Time, duration, micros},
    net::{App, Failure, Instance, Net, Outcome, Purpose, Sent},
    pacing::{self, Backoff},
    schedule::{
        pacing::{most_claims, poll_backoff, poll_pause, precedence_of_others},
        plan::Start,
    },
    slots::{Slots, Tick},
};

#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub lease: Duration,
    pub poll_interval: Duration,
    /// The most runs of an instance at a time.
    pub max_concurrent_runs: usize,
    /// The median of how long a run takes.
    pub runs: Time,
}

#[derive(Clone, Debug)]
pub enum Statement {
    /// Looks for what is due in a group, this many at most, and claims it (PostgreSQL).
    Look(usize, usize),
    /// Claims one of the rows that a look saw (MySQL, MariaDB), after others.
    Claim(Seen),
    Move(Tick, Start),
    Extend(Tick),
    End(Tick),
}

/// What a look saw, and what of it is claimed.
#[derive(Clone, Debug)]
pub struct Seen {
    rows: Vec<usize>,
    claimed: Vec<Tick>,
    next: Option<Time>,
}

pub enum Reply {
    Seen(Seen),
    Looked {
        claimed: Vec<Tick>,
        next: Option<Time>,
    },
    /// Whether the claim stood, and when the schedule is due again.
    Ended(Option<Time>),
    Stands(bool),
}

pub enum Timer {
    Look(Instance, u32),
    /// The work of a run is over.
    Done(Instance, u64),
    Renew(Instance, u64),
    /// A statement of a run is sent again.
    End(Instance, u64),
    Death,
}

struct Run {
    tick: Tick,
    deadline: Time,
    is_done: bool,
}

struct Process {
    group: usize,
    runs: Vec<Run>,
    poll_at: Time,
    /// Grows when the timer of the look is set anew.
    look: u32,
    looking: bool,
    pauses: Backoff,
}

pub struct Ticks {
    work: Work,
    slots: Slots,
    processes: Vec<Process>,
    /// When an instance died whose ticks are to be taken over.
    died: Option<Time>,
}

impl Ticks {
    pub fn new(work: Work, slots: Slots, instances: usize, groups: usize) -> Self {
        let process = |instance| Process {
            group: instance % groups,
            runs: Vec::new(),
            poll_at: 0,
            look: 0,
            looking: false,
            pauses: poll_backoff(work.poll_interval),
        };
        Self { work, slots, processes: (0..instances).map(process).collect(), died: None }
    }

    fn free(&self, instance: Instance) -> usize {
        self.work.max_concurrent_runs - self.processes[instance].runs.len()
    }

    /// Returns how many instances have the same schedules.
    fn alike(&self, instance: Instance) -> u32 {
        let group = self.processes[instance].group;
        u32::try_from(self.processes.iter().filter(|process| process.group == group).count()).unwrap_or(u32::MAX)
    }

    pub fn poll_at(&mut self, net: &mut Net<Self>, instance: Instance, at: Time) {
        let process = &mut self.processes[instance];
        (process.poll_at, process.look) = (at, process.look + 1);
        net.timer(at, Timer::Look(instance, process.look));
    }

    fn poll(&mut self, net: &mut Net<Self>, instance: Instance) {
        let free = self.free(instance).min(most_claims(self.alike(instance)) as usize);
        let process = &mut self.processes[instance];
        if free == 0 || process.looking {
            return;
        }
        process.looking = true;
        let group = process.group;
        let limit = net.now() + net.constants.time_limit;
        net.send(instance, Purpose::Requests, Statement::Look(group, free), limit);
    }

    /// Claims the next row that a look saw.
    fn on_seen(&mut self, net: &mut Net<Self>, sent: (Instance, Time), seen: Seen) {
        if seen.rows.is_empty() {
            return self.on_looked(net, sent, seen.claimed, seen.next);
        }
        let limit = net.now() + net.constants.time_limit;
        net.send(sent.0, Purpose::Requests, Statement::Claim(seen), limit);
    }

    fn on_looked(
        &mut self,
        net: &mut Net<Self>,
        (instance, sent): (Instance, Time),
        claimed: Vec<Tick>,
        next: Option<Time>,
    ) {
        let (now, poll_interval) = (net.now(), self.work.poll_interval);
        let count = claimed.len();
        for tick in claimed {
            self.begin(net, instance, sent, tick);
        }
        let alike = self.alike(instance);
        let process = &mut self.processes[instance];
        process.looking = false;
        let next_in = next.map_or(poll_interval, |next| duration(next.saturating_sub(now)));
        let pause = if next_in.is_zero() && count == 0 {
            process.pauses.next()
        } else {
            process.pauses = poll_backoff(poll_interval);
            let pause = if next_in.is_zero() { Duration::ZERO } else { poll_pause(next_in, poll_interval) };
            pause + precedence_of_others(u32::try_from(process.runs.len()).unwrap_or(u32::MAX), alike)
        };
        self.poll_at(net, instance, now + micros(pause));
    }

    fn begin(&mut self, net: &mut Net<Self>, instance: Instance, sent: Time, tick: Tick) {
        let (lease, claim) = (self.work.lease, tick.claim);
        let deadline = sent + micros(pacing::trusted(lease, lease));
        let start = self.slots.start(&tick, sent);
        self.processes[instance].runs.push(Run { tick: tick.clone(), deadline, is_done: false });
        net.timer(sent + micros(pacing::renewed_within(lease)), Timer::Renew(instance, claim));
        match start {
            Start::Run | Start::GiveUp | Start::Stop => self.run(net, instance, &tick),
            Start::Move { .. } | Start::Skip { .. } => {
                let limit = net.now() + net.constants.time_limit;
                net.send(instance, Purpose::Requests, Statement::Move(tick, start), limit);
            }
        }
    }

    fn run(&mut self, net: &mut Net<Self>, instance: Instance, tick: &Tick) {
        let (now, figures) = (net.now(), &mut net.figures);
        figures.granted += 1;
        figures.waits.push(now.saturating_sub(tick.time));
        if tick.taken_over {
            figures.takeovers.extend(self.died.map(|died| now - died));
        }
        let spread = 0.5 + fastrand::f64();
        net.timer(now + (self.work.runs as f64 * spread) as Time, Timer::Done(instance, tick.claim));
    }

    fn run_of(&mut self, instance: Instance, claim: u64) -> Option<&mut Run> {
        self.processes[instance].runs.iter_mut().find(|run| run.tick.claim == claim)
    }

    /// Records the end of a run, for as long as its lease and a statement may last.
    fn end(&mut self, net: &mut Net<Self>, instance: Instance, claim: u64) {
        let (now, limit) = (net.now(), net.now() + net.constants.time_limit);
        let Some(run) = self.run_of(instance, claim) else { return };
        run.is_done = true;
        if now > run.deadline + limit - now {
            return self.over(net, instance, claim, None);
        }
        let tick = run.tick.clone();
        net.send(instance, Purpose::Requests, Statement::End(tick), limit);
    }

    /// A run is over: there is room, and its schedule may be due again.
    fn over(&mut self, net: &mut Net<Self>, instance: Instance, claim: u64, due_at: Option<Time>) {
        let was_full = self.free(instance) == 0;
        self.processes[instance].runs.retain(|run| run.tick.claim != claim);
        let (now, process) = (net.now(), &self.processes[instance]);
        let at = if was_full { now } else { due_at.unwrap_or(process.poll_at).max(now) };
        if !process.looking && (was_full || at < process.poll_at) {
            let at = at.min(process.poll_at.max(now));
            self.poll_at(net, instance, at);
        }
    }

    fn lost(&mut self, net: &mut Net<Self>, instance: Instance, claim: u64) {
        net.figures.lost += 1;
        self.over(net, instance, claim, None);
    }

    fn renew(&mut self, net: &mut Net<Self>, instance: Instance, claim: u64) {
        let (now, lease) = (net.now(), self.work.lease);
        let Some(run) = self.run_of(instance, claim) else { return };
        if run.is_done {
            return;
        }
        if run.deadline <= now {
            return self.lost(net, instance, claim);
        }
        let (tick, limit) = (run.tick.clone(), (now + micros(pacing::attempt(lease))).min(run.deadline));
        net.send(instance, Purpose::Renewals, Statement::Extend(tick), limit);
    }

    /// The instance with the most runs dies.
    fn death(&mut self, net: &mut Net<Self>) {
        let busiest = (0..self.processes.len()).max_by_key(|instance| self.processes[*instance].runs.len());
        self.died = Some(net.now());
        busiest.into_iter().for_each(|instance| net.kill(instance));
    }
}

impl App for Ticks {
    type Statement = Statement;
    type Reply = Reply;
    type Timer = Timer;

    fn cost(&self, statement: &Statement, database: &Database) -> Time {
        match statement {
            // Each instance knows as many schedules as the first.
            Statement::Look(..) => database.read + database.known * self.slots.known(0) as Time,
            _ => database.write,
        }
    }

    fn execute(&mut self, net: &mut Net<Self>, statement: &Statement, _: Time) -> Outcome<Reply> {
        let (now, lease) = (net.now(), micros(self.work.lease));
        let database = net.server.conditions.database.clone();
        match statement {
            Statement::Look(group, most) => {
                let mut rows = self.slots.look(*group, *most, now);
                rows.reverse();
                if database.looks_again {
                    let next = self.slots.next_due(*group);
                    return Outcome::read(Reply::Seen(Seen { rows, claimed: Vec::new(), next }));
                }
                let claimed: Vec<Tick> = rows.into_iter().filter_map(|row| self.slots.claim(row, lease, now)).collect();
                let (core, commits) = (database.row * claimed.len() as Time, !claimed.is_empty());
                let next = self.slots.next_due(*group);
                Outcome { core, commits, ..Outcome::read(Reply::Looked { claimed, next }) }
            }
            Statement::Claim(seen) => {
                let mut seen = seen.clone();
                let claimed = seen.rows.pop().and_then(|row| self.slots.claim(row, lease, now));
                let commits = claimed.is_some();
                seen.claimed.extend(claimed);
                Outcome { commits, ..Outcome::read(Reply::Seen(seen)) }
            }
            Statement::Move(tick, start) => {
                let stands = match start {
                    Start::Move { to, .. } => self.slots.move_to(tick, *to),
                    _ => self.slots.end(tick, now).is_some(),
                };
                Outcome::written(Reply::Stands(stands))
            }
            Statement::Extend(tick) => Outcome::written(Reply::Stands(self.slots.extend(tick, now + lease))),
            Statement::End(tick) => {
                let further = if database.looks_again { 3 } else { 0 };
                Outcome { further, ..Outcome::written(Reply::Ended(self.slots.end(tick, now))) }
            }
        }
    }

    fn replied(&mut self, net: &mut Net<Self>, sent: Sent<Self>, reply: Result<Reply, Failure>) {
        let instance = sent.instance;
        match (sent.statement, reply) {
            (_, Ok(Reply::Looked { claimed, next })) => self.on_looked(net, (instance, sent.at), claimed, next),
            (_, Ok(Reply::Seen(seen))) => self.on_seen(net, (instance, sent.at), seen),
            (Statement::Look(..) | Statement::Claim(_), _) => {
                let process = &mut self.processes[instance];
                process.looking = false;
                let pause = micros(process.pauses.next());
                self.poll_at(net, instance, net.now() + pause);
            }
            (Statement::End(tick), Ok(Reply::Ended(due_at))) => self.over(net, instance, tick.claim, due_at),
            (Statement::End(tick), _) => {
                let pause = micros(pacing::renewal_retry(self.work.lease));
                net.timer(net.now() + pause, Timer::End(instance, tick.claim));
            }
            (Statement::Move(tick, Start::Move { .. }), Ok(Reply::Stands(true))) => self.run(net, instance, &tick),
            (Statement::Move(tick, _), _) => self.over(net, instance, tick.claim, None),
            (Statement::Extend(tick), Ok(Reply::Stands(true))) => {
                let lease = self.work.lease;
                let Some(run) = self.run_of(instance, tick.claim) else { return };
                run.deadline = sent.at + micros(pacing::trusted(lease, lease));
                net.timer(sent.at + micros(pacing::renewed_within(lease)), Timer::Renew(instance, tick.claim));
            }
            (Statement::Extend(tick), Ok(_)) => self.lost(net, instance, tick.claim),
            (Statement::Extend(tick), Err(_)) => {
                let soon = net.now() + micros(pacing::renewal_retry(self.work.lease));
                let Some(run) = self.run_of(instance, tick.claim) else { return };
                let at = soon.min(run.deadline);
                net.timer(at, Timer::Renew(instance, tick.claim));
            }
        }
    }

    fn timer(&mut self, net: &mut Net<Self>, timer: Timer) {
        match timer {
            Timer::Death => self.death(net),
            Timer::Look(instance, look) if !net.is_dead(instance) && self.processes[instance].look == look => {
                self.poll(net, instance);
            }
            Timer::Done(instance, claim) | Timer::End(instance, claim) if !net.is_dead(instance) => {
                self.end(net, instance, claim);
            }
            Timer::Renew(instance, claim) if !net.is_dead(instance) => self.renew(net, instance, claim),
            _ => {}
        }
    }
}
