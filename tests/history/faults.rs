//! The faults that workers and their database suffer, one at a time.

use std::time::Duration;

use harness::{PATIENCE, Server, TestDatabase, proxy::Way};
use rustix::process::Signal;
use sqlx::Pool;
use tokio::time::{sleep, timeout};

use crate::{
    crew::Crew,
    record::{Entry, Kind, Step},
    used::{DELAY, LEASE, Used, pick},
};

/// Longer than a lease, with a lock-delay.
const LONG: Duration = LEASE.saturating_add(DELAY).saturating_mul(9).checked_div(8).unwrap();

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL to a holder, and a new process to replace it.
    Kill,
    /// SIGSTOP to a holder for longer than its lease, then SIGCONT.
    Stop,
    Reset,
    /// No request arrives at the server for longer than a lease. The requests may arrive later.
    DeafServer,
    /// No reply arrives from the server for longer than a lease.
    DeafWorker,
    AcquireReplyLost,
    ReleaseReplyLost,
    CommitReplyLost,
    /// The COMMIT does not arrive at the server.
    CommitLost,
    /// The server ends the workers' connections.
    ConnectionsKilled,
    PoolExhausted,
    RowDeleted,
    /// Another client's transaction locks the lock's row (on SQLite: the file).
    RowInUse,
    /// Another client's transaction locks the rows in the reverse order.
    Deadlock,
}

impl Fault {
    /// A crash is evidence only if another process asked all the time. Each round has two, for a
    /// busy machine.
    pub fn all(server: &Server, used: Used) -> Vec<Self> {
        use Fault::*;
        let mut all = match server.name {
            "sqlite" => vec![Kill, Kill, Stop, PoolExhausted, RowDeleted, RowInUse],
            _ => vec![
                Kill,
                Kill,
                Stop,
                Reset,
                DeafServer,
                DeafWorker,
                AcquireReplyLost,
                ReleaseReplyLost,
                CommitReplyLost,
                CommitLost,
                ConnectionsKilled,
                PoolExhausted,
                RowDeleted,
                RowInUse,
                Deadlock,
            ],
        };
        all.retain(|fault| used.has_transactions() || !matches!(fault, CommitReplyLost | CommitLost | Deadlock));
        all
    }
}

impl<DB: TestDatabase> Crew<'_, DB> {
    pub async fn trouble(&mut self, fault: Fault) {
        let place = self.random.usize(..self.members.len());
        let key = pick(self.used.rows(), &mut self.random);
        match fault {
            Fault::Kill => self.kill(place).await,
            Fault::Stop => self.stop(place).await,
            Fault::Reset => self.members[place].proxy.as_ref().unwrap().cut(),
            Fault::DeafServer => self.deafen(place, Way::Requests).await,
            Fault::DeafWorker => self.deafen(place, Way::Replies).await,
            Fault::AcquireReplyLost => self.lose(place, "acquire", Way::Replies, 0).await,
            Fault::ReleaseReplyLost => self.lose(place, "release", Way::Replies, 0).await,
            // The request before it checks that the transaction is still open.
            Fault::CommitReplyLost => self.lose(place, "commit", Way::Replies, 1).await,
            Fault::CommitLost => self.lose(place, "commit", Way::Requests, 1).await,
            Fault::ConnectionsKilled => kill_connections::<DB>(&self.pool, self.db.server.name).await,
            Fault::PoolExhausted => self.exhaust(place).await,
            Fault::RowDeleted => self.delete_row(key).await,
            Fault::RowInUse => self.sit_at(&[lock_row::<DB>(key)]).await,
            Fault::Deadlock => {
                let work = format!("UPDATE work SET number = number WHERE id = '{key}'");
                self.sit_at(&[work, lock_row::<DB>(key)]).await;
            }
        }
    }

    fn either(&mut self) -> Kind {
        if self.random.bool() || !self.used.has_transactions() { Kind::Lease } else { Kind::Transaction }
    }

    async fn kill(&mut self, place: usize) {
        let kind = self.either();
        let held = self.hold(place, kind, 2 * PATIENCE).await;
        if let Some(key) = &held {
            self.asked_for(key).await;
        }
        let before = held.as_ref().map(|key| self.grants(key));
        let member = self.members.remove(place);
        member.signal(Signal::KILL);
        self.tell(member.number, 0, Step::Killed);
        member.ends().await;
        self.start(true).await;
        if let (Some(key), Some(before)) = (held, before) {
            self.granted(&key, before, 2 * LONG).await;
        }
    }

    async fn stop(&mut self, place: usize) {
        let kind = self.either();
        let held = self.hold(place, kind, 2 * LEASE).await;
        let before = held.as_ref().map(|key| self.grants(key));
        let number = self.members[place].number;
        self.tell(number, 0, Step::Stopped);
        self.members[place].signal(Signal::STOP);
        sleep(LONG).await;
        if let (Some(key), Some(before)) = (held, before) {
            // No other process is granted the key while its transaction keeps the row locked.
            self.granted(&key, before, LEASE / 2).await;
        }
        self.members[place].signal(Signal::CONT);
        self.tell(number, 0, Step::Continued);
    }

    async fn deafen(&mut self, place: usize, way: Way) {
        let key = self.hold(place, Kind::Lease, 2 * LEASE).await;
        let before = key.as_ref().map(|key| self.grants(key));
        let late = self.random.bool();
        let (proxy, number) = (self.members[place].proxy.as_ref().unwrap(), self.members[place].number);
        self.tell(number, 0, Step::CutOff);
        proxy.hold(way);
        sleep(LONG).await;
        if let (Some(key), Some(before)) = (key, before) {
            self.granted(&key, before, LONG).await;
        }
        if late {
            proxy.open()
        } else {
            proxy.cut()
        }
        self.tell(number, 0, Step::Reached);
    }

    /// Once the given number of others have passed in this direction, the next is lost together
    /// with the connection.
    async fn lose(&mut self, place: usize, of: &str, way: Way, before: usize) {
        let (after, number) = (self.said(), self.members[place].number);
        self.members[place].order(format_args!("pause {of}")).await;
        // It may first wait for other processes, and for lock-delays.
        let there = |entry: &Entry| entry.process == number && entry.step == Step::Paused;
        assert!(self.comes(after, 3 * PATIENCE, there).await, "it comes to {of}");
        self.tell(number, 0, Step::CutOff);
        let member = &mut self.members[place];
        member.proxy.as_ref().unwrap().hold_after(way, before);
        member.order("go").await;
        let proxy = member.proxy.as_ref().unwrap();
        proxy.held(way).await;
        // Another statement of the process may have been first.
        sleep(Duration::from_millis(20)).await;
        proxy.cut();
        self.tell(number, 0, Step::Reached);
    }

    async fn exhaust(&mut self, place: usize) {
        let key = self.hold(place, Kind::Lease, 2 * LEASE).await;
        let before = key.as_ref().map(|key| self.grants(key));
        self.members[place].order(format_args!("exhaust {}", (LONG + LEASE / 2).as_millis())).await;
        let number = self.members[place].number;
        self.tell(number, 0, Step::CutOff);
        sleep(LONG + LEASE / 2).await;
        self.tell(number, 0, Step::Reached);
        if let (Some(key), Some(before)) = (key, before) {
            self.granted(&key, before, LONG).await;
        }
    }

    async fn delete_row(&mut self, key: &str) {
        self.tell(0, 0, Step::Deleting { key: key.to_owned() });
        let sql = format!("DELETE FROM t_resource_lock WHERE key_resource = '{key}'");
        let deleted = timeout(PATIENCE, async {
            while DB::execute(&self.pool, &sql).await.is_err() {
                sleep(Duration::from_millis(10)).await;
            }
        });
        deleted.await.expect("the row can be deleted");
        self.tell(0, 0, Step::Deleted { key: key.to_owned() });
    }

    /// Another client's transaction that locks these rows one after the other. It may itself be the
    /// victim of a deadlock.
    async fn sit_at(&mut self, rows: &[String]) {
        let pool = self.db.pool_of(1).await;
        let mut conn = pool.acquire().await.unwrap();
        let long = Duration::from_millis(self.random.u64(50..400));
        let end = if self.random.bool() { "COMMIT" } else { "ROLLBACK" };
        if DB::execute_on(&mut conn, DB::BEGIN).await.is_ok() {
            for row in rows {
                let _ = DB::execute_on(&mut conn, row).await;
                sleep(long / u32::try_from(rows.len()).unwrap()).await;
            }
            let _ = DB::execute_on(&mut conn, end).await;
        }
        drop(conn);
        pool.close().await;
    }
}

fn lock_row<DB: TestDatabase>(key: &str) -> String {
    DB::LOCK_ROW.replace("'k'", &format!("'{key}'"))
}

/// Ends all connections to the database but this one.
pub async fn kill_connections<DB: TestDatabase>(pool: &Pool<DB>, server: &str) {
    if server == "postgres" {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        DB::execute(pool, sql).await.unwrap();
        return;
    }
    let (id, from) = match server {
        // MySQL's process list fails while any statement runs that contains bytes that are not
        // text.
        "mysql" => ("processlist_id", "performance_schema.threads WHERE processlist_db"),
        _ => ("id", "information_schema.processlist WHERE db"),
    };
    let sql = format!(
        "SELECT CAST(COALESCE(GROUP_CONCAT({id}), '') AS CHAR(1000)) FROM {from} = DATABASE() AND {id} <> CONNECTION_ID()"
    );
    let ids = DB::text(pool, &sql).await.unwrap();
    for id in ids.split(',').filter(|id| !id.is_empty()) {
        // The connection may have ended by itself.
        let _ = DB::execute(pool, &format!("KILL {id}")).await;
    }
}
