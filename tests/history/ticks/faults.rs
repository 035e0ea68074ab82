//! The faults that workers and their database suffer, and deploys, one at a time.

use std::time::Duration;

use harness::{Server, proxy::Way};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    crew::Books,
    faults::kill_connections,
    record::now,
    ticks::{
        checker::GRACE,
        crew::Crew,
        record::Step,
        terms::{COUNT, LEASE},
    },
};

/// Longer than a lease.
const LONG: Duration = LEASE.saturating_mul(5).checked_div(4).unwrap();

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL in the middle of a run, and a new process.
    Kill,
    /// SIGSTOP in the middle of a run for longer than its lease, then SIGCONT.
    Stop,
    Reset,
    /// No request arrives at the server for longer than a lease. The requests may arrive later.
    DeafServer,
    /// No reply arrives from the server for longer than a lease.
    DeafWorker,
    /// A reply is lost, of a claim, a renewal, an end or a commit.
    ReplyLost,
    /// The same of a request.
    RequestLost,
    /// The server ends the workers' connections.
    ConnectionsKilled,
    /// Another client's transaction locks a schedule's row (on SQLite: the file).
    RowInUse,
    /// A new version is deployed, with other times for half of the schedules. The third one has the
    /// times of the first again.
    Deploy,
}

impl Fault {
    pub fn all(server: &Server) -> Vec<Self> {
        use Fault::*;
        match server.name {
            "sqlite" => vec![Kill, Kill, Kill, Stop, RowInUse, Deploy, Deploy, Deploy],
            _ => vec![
                Kill,
                Kill,
                Kill,
                Stop,
                Reset,
                DeafServer,
                DeafWorker,
                ReplyLost,
                ReplyLost,
                RequestLost,
                ConnectionsKilled,
                RowInUse,
                Deploy,
                Deploy,
                Deploy,
            ],
        }
    }
}

impl<DB: Books> Crew<'_, DB> {
    pub async fn trouble(&mut self, fault: Fault) {
        let place = self.random.usize(..self.members.len());
        match fault {
            Fault::Kill => {
                let place = self.any_busy(place).await;
                let (number, names) = self.kill(place).await;
                self.runs_elsewhere(names, number, now(), LEASE + GRACE).await;
            }
            Fault::Stop => self.stop(place).await,
            Fault::Reset => self.members[place].proxy.as_ref().unwrap().cut(),
            Fault::DeafServer => self.deafen(place, Way::Requests).await,
            Fault::DeafWorker => self.deafen(place, Way::Replies).await,
            Fault::ReplyLost => self.lose(place, Way::Replies).await,
            Fault::RequestLost => self.lose(place, Way::Requests).await,
            Fault::ConnectionsKilled => kill_connections::<DB>(&self.pool, self.db.server.name).await,
            Fault::RowInUse => self.sit_at_a_row().await,
            Fault::Deploy => self.deploy().await,
        }
    }

    /// Waits until this worker or, if it is slow, another one runs something.
    async fn any_busy(&self, place: usize) -> usize {
        self.busy(self.members[place].number).await;
        let busy = |place: &usize| !self.running(self.members[*place].number).is_empty();
        if busy(&place) { place } else { (0..self.members.len()).find(busy).unwrap_or(place) }
    }

    async fn stop(&mut self, place: usize) {
        let number = self.members[place].number;
        self.busy(number).await;
        self.tell(number, Step::Stopped);
        self.members[place].signal(Signal::STOP);
        sleep(LONG).await;
        self.members[place].signal(Signal::CONT);
        self.tell(number, Step::Continued);
    }

    async fn deafen(&mut self, place: usize, way: Way) {
        self.busy(self.members[place].number).await;
        let late = self.random.bool();
        let (proxy, since) = (self.members[place].proxy.as_ref().unwrap(), now());
        proxy.hold(way);
        sleep(LONG).await;
        if late {
            proxy.open()
        } else {
            proxy.cut()
        }
        self.tell(self.members[place].number, Step::CutOff { since });
    }

    /// One of the next messages is lost together with all connections.
    async fn lose(&mut self, place: usize, way: Way) {
        self.busy(self.members[place].number).await;
        let before = self.random.usize(..8);
        let (proxy, since) = (self.members[place].proxy.as_ref().unwrap(), now());
        proxy.hold_after(way, before);
        proxy.held(way).await;
        sleep(Duration::from_millis(20)).await;
        proxy.cut();
        self.tell(self.members[place].number, Step::CutOff { since });
    }

    async fn sit_at_a_row(&mut self) {
        let name = format!("s{}", self.random.usize(..COUNT));
        let lock = match self.db.server.name {
            "sqlite" => format!("UPDATE t_resource_schedule SET slot = slot WHERE name = '{name}'"),
            _ => format!("SELECT 1 FROM t_resource_schedule WHERE name = '{name}' FOR UPDATE"),
        };
        let pool = self.db.pool_of(1).await;
        let mut conn = pool.acquire().await.unwrap();
        if DB::execute_on(&mut conn, DB::BEGIN).await.is_ok() {
            let _ = DB::execute_on(&mut conn, &lock).await;
            sleep(Duration::from_millis(self.random.u64(50..400))).await;
            let _ = DB::execute_on(&mut conn, "ROLLBACK").await;
        }
        drop(conn);
        pool.close().await;
    }
}
