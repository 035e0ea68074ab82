//! Waiting in the order of tickets (`src/queue/tickets.rs`). Who is next is decided by the code's
//! own `src/queue/position.rs`.

use std::collections::BTreeMap;

use crate::{
    events::{SECOND, Time},
    key::Key,
    locks::{Locks, Reply, Stage, Statement, Timer},
    net::{Failure, Instance, Net, Outcome, Purpose},
    position::{Position, read_queue},
    store::queue::{FRONT, QueueEntry},
};

/// The table of tickets.
#[derive(Default)]
pub struct Queues {
    /// Of each key, the tickets and how long they live.
    tickets: BTreeMap<usize, BTreeMap<i64, Time>>,
    last: i64,
}

impl Queues {
    fn draw(&mut self, key: usize, until: Time) -> i64 {
        self.last += 1;
        self.tickets.entry(key).or_default().insert(self.last, until);
        self.last
    }

    /// Returns the position of a ticket, and how many that have lapsed were deleted.
    fn position(&mut self, key: usize, number: i64, now: Time) -> (Position, usize) {
        let name = Key::of(&key.to_string());
        let tickets = self.tickets.entry(key).or_default();
        let entry = |(number, until): (&i64, &Time)| {
            let left_micros = i64::try_from(*until).unwrap() - i64::try_from(now).unwrap();
            QueueEntry { key: name.as_str().to_owned(), number: *number, left_micros }
        };
        let front: Vec<QueueEntry> = tickets.range(..=number).take(FRONT as usize).map(entry).collect();
        let view = read_queue(std::slice::from_ref(&name), number, &front);
        let clears = matches!(view.at, Position::First | Position::Unknown);
        let lapsed = if clears { view.lapsed } else { Vec::new() };
        tickets.retain(|number, _| !lapsed.contains(number));
        (view.at, lapsed.len())
    }
}

impl Locks {
    /// Requests the key of a fair handle: reads the queue before the claim, unless a claim that may
    /// have been granted comes first.
    pub fn request(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let is_fair = self.work.fair;
        let task = self.task(instance, index);
        if !is_fair || task.unanswered {
            return self.claim(net, instance, index);
        }
        let number = task.ticket.unwrap_or(i64::MAX);
        self.send_for(net, instance, index, |key| Statement::Front(index, key, number));
    }

    fn send_for(
        &mut self,
        net: &mut Net<Self>,
        instance: Instance,
        index: usize,
        statement: impl FnOnce(usize) -> Statement,
    ) {
        let limit = net.now() + net.constants.time_limit;
        let task = self.task(instance, index);
        (task.stage, task.change) = (Stage::Claiming, task.change + 1);
        net.send(instance, Purpose::Requests, statement(task.key), limit);
    }

    pub fn draw(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        self.send_for(net, instance, index, |key| Statement::Draw(index, key));
    }

    pub fn on_position(
        &mut self,
        net: &mut Net<Self>,
        instance: Instance,
        index: usize,
        at: Result<Position, Failure>,
    ) {
        let task = self.task(instance, index);
        match at {
            Ok(Position::First) => self.claim(net, instance, index),
            Ok(Position::Behind { .. }) if task.ticket.is_none() => self.draw(net, instance, index),
            Ok(Position::Behind { number, left, .. }) => self.refused(net, instance, index, left, number),
            Ok(Position::TicketMissing | Position::Unknown) => self.draw(net, instance, index),
            Err(_) => {
                let pause = task.failures.next();
                self.pause(net, instance, index, pause);
            }
        }
    }

    pub fn on_drawn(&mut self, net: &mut Net<Self>, instance: Instance, index: usize, number: Option<i64>) {
        let task = self.task(instance, index);
        let Some(number) = number else {
            let pause = task.failures.next();
            return self.pause(net, instance, index, pause);
        };
        task.ticket = Some(number);
        self.request(net, instance, index);
        let process = &mut self.processes[instance];
        if !std::mem::replace(&mut process.heartbeats, true) {
            net.timer(net.now() + heartbeat(net.constants.alive), Timer::Heartbeat(instance));
        }
    }

    /// One statement keeps all tickets of the instance alive.
    pub fn heartbeat(&mut self, net: &mut Net<Self>, instance: Instance) {
        let process = &mut self.processes[instance];
        let tickets: Vec<(usize, i64)> =
            process.tasks.iter().filter_map(|task| Some((task.key, task.ticket?))).collect();
        process.heartbeats = !tickets.is_empty();
        if process.heartbeats {
            let interval = heartbeat(net.constants.alive);
            let limit = net.now() + net.constants.alive as Time * SECOND / 4;
            net.send(instance, Purpose::Renewals, Statement::Heartbeat(tickets), limit);
            net.timer(net.now() + interval, Timer::Heartbeat(instance));
        }
    }

    /// Gives the ticket up after use.
    pub fn leave(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let task = self.task(instance, index);
        let Some(number) = task.ticket.take() else { return };
        let (key, limit) = (task.key, net.now() + SECOND);
        net.send(instance, Purpose::Requests, Statement::Leave(key, number), limit);
    }

    pub fn run_on_queues(&mut self, net: &Net<Self>, statement: &Statement) -> Outcome<Reply> {
        assert_eq!(net.constants.front as u64, FRONT, "that of this crate is another");
        let (now, alive) = (net.now(), net.constants.alive as Time * SECOND);
        let queues = &mut self.queues;
        match statement {
            Statement::Draw(_, key) => Outcome::written(Reply::Drawn(queues.draw(*key, now + alive))),
            Statement::Front(_, key, number) => {
                let (at, cleared) = queues.position(*key, *number, now);
                Outcome { further: u32::from(cleared > 0), ..Outcome::read(Reply::Position(at)) }
            }
            Statement::Heartbeat(tickets) => {
                for (key, number) in tickets {
                    let until = queues.tickets.entry(*key).or_default().get_mut(number);
                    until.into_iter().for_each(|until| *until = now + alive);
                }
                Outcome::written(Reply::Done)
            }
            Statement::Leave(key, number) => {
                queues.tickets.entry(*key).or_default().remove(number);
                Outcome::written(Reply::Done)
            }
            _ => unreachable!("no statement on the queues"),
        }
    }
}

/// The interval between heartbeats, as in `src/queue/tickets.rs`.
fn heartbeat(alive: usize) -> Time {
    alive as Time / 3 * SECOND
}
