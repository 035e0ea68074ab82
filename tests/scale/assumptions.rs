//! What is assumed of the database, the network and the failures. `docs/scale.md` names the
//! sources.

use crate::events::{MILLISECOND, SECOND, Time};

/// A database server.
#[derive(Clone, Debug)]
pub struct Database {
    /// Releases are notified (PostgreSQL).
    pub notifies: bool,
    /// A look and a claim are statements of their own (MySQL, MariaDB).
    pub looks_again: bool,
    /// How many statements run at the same moment.
    pub cores: usize,
    pub connections: usize,
    /// What a statement takes of a core, and each further row of it.
    pub read: Time,
    pub write: Time,
    pub row: Time,
    /// How long a commit waits for the disk or for a standby.
    pub commit: Time,
    /// What opening a connection takes of a core.
    pub connect: Time,
    /// What a notification takes of a core for each session that listens.
    pub notify: Time,
}

impl Database {
    pub fn postgres(cores: usize, connections: usize) -> Self {
        Self {
            notifies: true,
            looks_again: false,
            cores,
            connections,
            read: 110,
            write: 300,
            row: 20,
            commit: MILLISECOND,
            connect: 4 * MILLISECOND,
            notify: 35,
        }
    }

    pub fn mysql(cores: usize, connections: usize) -> Self {
        let (read, write, connect) = (150, 500, MILLISECOND);
        Self { notifies: false, looks_again: true, read, write, connect, ..Self::postgres(cores, connections) }
    }
}

/// How connections end when the database fails over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Each is closed, and new ones are refused until the end.
    Refused,
    /// None answers, and neither do new ones, until the end.
    Silent,
}

/// What happens to the database or the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    FailOver(Loss),
    /// Each statement takes ten times as long.
    BrownOut,
    /// Each message takes ten times as long.
    SlowNetwork,
}

/// How much longer statements or messages take under a fault.
const SLOWER: Time = 10;

/// The conditions of a run.
#[derive(Clone, Debug)]
pub struct Conditions {
    pub database: Database,
    /// The median round trip.
    pub round_trip: Time,
    /// A fault, and when it begins and ends.
    pub fault: Option<(Fault, Time, Time)>,
}

impl Conditions {
    pub fn new(database: Database) -> Self {
        Self { database, round_trip: 600, fault: None }
    }

    /// Returns whether this fault is present.
    fn is(&self, fault: Fault, now: Time) -> bool {
        self.fault.is_some_and(|(kind, begin, end)| kind == fault && (begin..end).contains(&now))
    }

    /// Draws how long a message takes in one direction: with a long tail, one in a hundred takes
    /// four times the median.
    pub fn one_way(&self, now: Time) -> Time {
        let slower = if self.is(Fault::SlowNetwork, now) { SLOWER } else { 1 };
        slower * spread(self.round_trip / 2)
    }

    /// Draws how long a statement keeps a core busy.
    pub fn service(&self, cost: Time, now: Time) -> Time {
        let slower = if self.is(Fault::BrownOut, now) { SLOWER } else { 1 };
        slower * spread(cost)
    }

    /// Draws how long a commit waits.
    pub fn commit(&self, now: Time) -> Time {
        self.service(self.database.commit, now)
    }

    /// How the database is lost at this moment, if it is.
    pub fn loss(&self, now: Time) -> Option<Loss> {
        [Loss::Refused, Loss::Silent].into_iter().find(|loss| self.is(Fault::FailOver(*loss), now))
    }

    /// When the fault ends.
    pub fn recovered(&self) -> Option<Time> {
        self.fault.map(|(_, _, end)| end)
    }
}

/// Draws from 0.7 times a median upwards: 0.7 and an exponential part with the median 0.3.
fn spread(median: Time) -> Time {
    let exponential = -(1.0 - fastrand::f64()).log2();
    (median as f64 * (0.7 + 0.3 * exponential)) as Time
}

/// How long a fail-over of the scenarios takes.
pub const FAIL_OVER: Time = 30 * SECOND;
