//! The database server as a queue in front of cores, and its connections.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::{assumptions::Conditions, events::Time, figures::Figures};

pub struct Server {
    pub conditions: Conditions,
    /// When each core is free.
    cores: BinaryHeap<Reverse<Time>>,
    pub connections: usize,
    /// Grows when all connections are lost.
    pub epoch: u32,
}

impl Server {
    pub fn new(conditions: Conditions) -> Self {
        let cores = std::iter::repeat_n(Reverse(0), conditions.database.cores).collect();
        Self { conditions, cores, connections: 0, epoch: 0 }
    }

    /// Queues work, and returns when it ends.
    pub fn work(&mut self, cost: Time, now: Time, figures: &mut Figures) -> Time {
        let service = self.conditions.service(cost, now);
        let free = self.cores.pop().map_or(now, |Reverse(free)| free.max(now));
        figures.worked(now, free - now, service);
        self.cores.push(Reverse(free + service));
        free + service
    }

    /// All connections are lost, with the statements on them.
    pub fn fail(&mut self, now: Time) {
        self.epoch += 1;
        self.connections = 0;
        self.cores = std::iter::repeat_n(Reverse(now), self.conditions.database.cores).collect();
    }

    pub fn is_full(&self) -> bool {
        self.connections >= self.conditions.database.connections
    }

    pub fn disconnect(&mut self, epoch: u32) {
        if epoch == self.epoch {
            self.connections = self.connections.saturating_sub(1);
        }
    }
}
