//! How an instance sends claims: those that are made while a statement is in flight share the next
//! one (`src/batch/`).

use crate::{
    events::Time,
    key::Holder,
    locks::{Locks, Stage, Statement, Timer},
    net::{Failure, Instance, Net, Purpose},
    rows::ClaimReply,
};

/// The claim of a task.
#[derive(Clone, Debug)]
pub struct Request {
    pub task: usize,
    pub key: usize,
    pub holder: Holder,
    pub waited: bool,
}

impl Locks {
    /// Queues the claim of a task.
    pub fn claim(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let task = self.task(instance, index);
        (task.stage, task.change) = (Stage::Claiming, task.change + 1);
        let request = Request { task: index, key: task.key, holder: task.holder, waited: task.waited };
        let process = &mut self.processes[instance];
        process.queue.push_back((net.now(), request));
        let timer = match process.in_flight {
            // Ready tasks join.
            0 => (net.now(), Timer::Flush(instance)),
            _ => (net.now() + net.constants.queue_delay, Timer::OpenWorker(instance)),
        };
        net.timer(timer.0, timer.1);
    }

    /// Sends what is queued, if no statement is in flight or the first request has waited for long.
    pub fn flush(&mut self, net: &mut Net<Self>, instance: Instance) {
        let process = &mut self.processes[instance];
        let Some((since, _)) = process.queue.front() else { return };
        let (delay, most) = (net.constants.queue_delay, net.constants.requests);
        let is_stuck = net.now() >= since + delay && process.in_flight < most;
        if process.in_flight > 0 && !is_stuck {
            return;
        }
        let count = process.queue.len().min(net.constants.batch);
        let requests = process.queue.drain(..count).map(|(_, request)| request).collect();
        process.in_flight += 1;
        let limit = net.now() + net.constants.time_limit;
        net.send(instance, Purpose::Requests, Statement::Claim(requests), limit);
    }

    pub fn on_claims(
        &mut self,
        net: &mut Net<Self>,
        sent: (Instance, Time),
        requests: &[Request],
        replies: Result<Vec<ClaimReply>, Failure>,
    ) {
        let instance = sent.0;
        self.processes[instance].in_flight -= 1;
        match replies {
            Ok(replies) => {
                for (request, reply) in requests.iter().zip(replies) {
                    self.on_claim(net, sent, request.task, reply);
                }
            }
            Err(failure) => {
                requests.iter().for_each(|request| self.on_claim_failed(net, instance, request.task, failure));
            }
        }
        self.flush(net, instance);
    }
}
