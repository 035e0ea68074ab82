//! What the statements of locks cost, what they do to the tables, and where replies and timers go.

use crate::{
    assumptions::Database,
    claims::Request,
    events::Time,
    locks::{Locks, Reply, Statement, Timer},
    net::{App, Failure, Net, Outcome, Sent},
    rows::ClaimReply,
};

impl App for Locks {
    type Statement = Statement;
    type Reply = Reply;
    type Timer = Timer;

    fn cost(&self, statement: &Statement, database: &Database) -> Time {
        let of = |first: Time, rows: usize| first + database.row * rows.saturating_sub(1) as Time;
        match statement {
            Statement::Claim(requests) => of(database.read, requests.len()),
            Statement::Renew(_, claims) => of(database.write, claims.len()),
            Statement::Heartbeat(tickets) => of(database.write, tickets.len()),
            Statement::Listen | Statement::Front(..) => database.read,
            _ => database.write,
        }
    }

    fn execute(&mut self, net: &mut Net<Self>, statement: &Statement, committed: Time) -> Outcome<Reply> {
        let (now, database) = (net.now(), net.server.conditions.database.clone());
        match statement {
            Statement::Claim(requests) => {
                let judged =
                    |request: &Request| self.table.claim(request.key, request.holder, request.waited, now, committed);
                let replies: Vec<ClaimReply> = requests.iter().map(judged).collect();
                let granted = replies.iter().filter(|reply| matches!(reply, ClaimReply::Granted)).count();
                let core =
                    if granted > 0 { database.write - database.read + database.row * granted as Time } else { 0 };
                // A waiter looks before it claims; other requests look when they are refused.
                let waits = requests.iter().all(|request| request.waited);
                let again = if waits { granted > 0 } else { granted < replies.len() };
                let further = u32::from(database.looks_again && again);
                Outcome { reply: Reply::Claims(replies), commits: granted > 0, core, further }
            }
            Statement::Renew(_, claims) => {
                let stand = claims.iter().map(|(_, key, holder)| self.table.renew(*key, *holder, now)).collect();
                Outcome::written(Reply::Renewed(stand))
            }
            Statement::Release(_, key, holder) => {
                let is_awaited = self.table.release(*key, *holder);
                self.released[*key] = Some(now);
                if is_awaited && database.notifies {
                    self.notify(net, *key, now);
                }
                // On PostgreSQL the release is committed asynchronously.
                Outcome { commits: !database.notifies, ..Outcome::read(Reply::Done) }
            }
            Statement::RequestNotification(_, key) => {
                Outcome::written(Reply::Free(self.table.request_notification(*key)))
            }
            Statement::Listen => Outcome::read(Reply::Done),
            _ => self.run_on_queues(net, statement),
        }
    }

    fn replied(&mut self, net: &mut Net<Self>, sent: Sent<Self>, reply: Result<Reply, Failure>) {
        let instance = sent.instance;
        match (sent.statement, reply) {
            (Statement::Claim(requests), reply) => {
                let replies = reply.map(|reply| if let Reply::Claims(replies) = reply { replies } else { Vec::new() });
                self.on_claims(net, (instance, sent.at), &requests, replies);
            }
            (Statement::Renew(number, _), Ok(Reply::Renewed(stand))) => {
                self.on_renewed(net, (instance, sent.at), number, &stand);
            }
            (Statement::Renew(number, _), _) => self.on_renewal_failed(net, instance, number),
            (Statement::Release(index, ..), Ok(_)) => self.rest(net, instance, index),
            (Statement::Release(index, ..), Err(_)) => self.release_later(net, instance, index),
            (Statement::RequestNotification(index, _), Ok(Reply::Free(true))) => self.notified(net, instance, index),
            (Statement::RequestNotification(..), _) => {}
            (Statement::Listen, reply) => self.on_listening(net, instance, reply.is_ok()),
            (Statement::Front(index, ..), Ok(Reply::Position(at))) => self.on_position(net, instance, index, Ok(at)),
            (Statement::Front(index, ..), reply) => {
                let failure = reply.err().unwrap_or(Failure::NoReply);
                self.on_position(net, instance, index, Err(failure));
            }
            (Statement::Draw(index, _), Ok(Reply::Drawn(number))) => self.on_drawn(net, instance, index, Some(number)),
            (Statement::Draw(index, _), _) => self.on_drawn(net, instance, index, None),
            (Statement::Heartbeat(_) | Statement::Leave(..), _) => {}
        }
    }

    fn timer(&mut self, net: &mut Net<Self>, timer: Timer) {
        match timer {
            Timer::Death => self.death(net),
            Timer::Start(instance) if !net.is_dead(instance) => {
                (0..self.processes[instance].tasks.len()).for_each(|index| self.wait(net, instance, index));
            }
            Timer::Wait(instance, index) if !net.is_dead(instance) => self.wait(net, instance, index),
            Timer::Poll(instance, index, change) if self.is_at(net, instance, index, change) => {
                self.poll(net, instance, index);
            }
            Timer::Release(instance, index, change) if self.is_at(net, instance, index, change) => {
                self.release(net, instance, index);
            }
            Timer::Notified(instance, index) if !net.is_dead(instance) => self.notified(net, instance, index),
            Timer::Flush(instance) | Timer::OpenWorker(instance) if !net.is_dead(instance) => {
                self.flush(net, instance);
            }
            Timer::Renew(instance, number) if !net.is_dead(instance) => self.renew_timer(net, instance, number),
            Timer::Hedge(instance, number) if !net.is_dead(instance) => self.hedge(net, instance, number),
            Timer::Heartbeat(instance) if !net.is_dead(instance) => self.heartbeat(net, instance),
            Timer::Listen(instance) if !net.is_dead(instance) => {
                self.processes[instance].listening = None;
                self.listen(net, instance);
            }
            _ => {}
        }
    }

    fn disconnected(&mut self, net: &mut Net<Self>) {
        self.stop_listening(net);
    }
}
