//! How an instance is told of releases by others (`src/queue/listener.rs`).

use crate::{
    events::{Time, micros},
    locks::{Locks, Process, Stage, Statement, Timer},
    net::{Instance, Net, Purpose},
    pacing,
};

impl Locks {
    /// Opens the connection that listens, unless it is open or opening.
    pub fn listen(&mut self, net: &mut Net<Self>, instance: Instance) {
        let process = &mut self.processes[instance];
        if process.listening.is_none() {
            process.listening = Some(false);
            let limit = net.now() + net.constants.listen;
            net.send(instance, Purpose::Listening, Statement::Listen, limit);
        }
    }

    pub fn on_listening(&mut self, net: &mut Net<Self>, instance: Instance, is_open: bool) {
        let process = &mut self.processes[instance];
        if is_open {
            process.listening = Some(true);
            process.listen_pauses = None;
            // Tasks that wait request a notification.
            (0..self.processes[instance].tasks.len()).for_each(|index| self.notified(net, instance, index));
            return;
        }
        let pause = process.listen_pauses.get_or_insert_with(pacing::open_backoff).next();
        net.timer(net.now() + micros(pause), Timer::Listen(instance));
    }

    pub fn notified(&mut self, net: &mut Net<Self>, instance: Instance, index: usize) {
        let task = self.task(instance, index);
        match task.stage {
            Stage::Pausing if task.waited => self.poll(net, instance, index),
            Stage::Claiming => task.notified = true,
            _ => {}
        }
    }

    /// A release is told to all sessions that listen, and wakes the tasks that want the key.
    pub fn notify(&mut self, net: &mut Net<Self>, key: usize, committed: Time) {
        let is_listening = |process: &Process| process.listening == Some(true);
        let sessions = self.processes.iter().filter(|process| is_listening(process)).count();
        let cost = net.server.conditions.database.notify * sessions as Time;
        let end = net.server.work(cost, committed, &mut net.figures);
        for &(instance, index) in &self.wanted[key] {
            if is_listening(&self.processes[instance]) && !net.is_dead(instance) {
                let at = end + net.server.conditions.one_way(end);
                net.timer(at, Timer::Notified(instance, index));
            }
        }
    }

    /// The server closed the connections that listen. Each is opened again after a pause.
    pub fn stop_listening(&mut self, net: &mut Net<Self>) {
        for instance in 0..self.processes.len() {
            if self.processes[instance].listening == Some(true) && !net.is_dead(instance) {
                self.on_listening(net, instance, false);
                self.processes[instance].listening = Some(false);
            }
        }
    }
}
