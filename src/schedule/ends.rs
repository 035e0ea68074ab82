//! The ends of runs, batched.

use std::sync::Arc;

use crate::{
    key::{Claim, Key},
    session::{loan::Loan, queue::BatchOp, sessions::Sessions, time::Instant, timers::timeout_at},
    store::{Database, Reply, failure::Failure, in_transaction, schedule::End},
};

/// The batch operation that ends runs: in one transaction, whose commit waits for the disk once.
pub struct Ends;

impl<DB: Database> BatchOp<DB> for Ends {
    type Request = Arc<(Claim, End)>;
    /// Whether the claim stood.
    type Output = bool;

    fn key(ending: &Self::Request) -> Option<&Key> {
        Some(&ending.0.key)
    }

    fn can_share_statement(_: &Self::Request, _: &Self::Request) -> bool {
        true
    }

    fn share(_: &bool) -> Option<bool> {
        None
    }

    async fn run(
        &self,
        mut session: Loan<DB>,
        _: &Sessions<DB>,
        endings: &[Self::Request],
        limit: Instant,
    ) -> Result<Vec<bool>, Failure> {
        let reply = timeout_at(limit, end_runs::<DB>(session.get(), endings)).await;
        session.settle(reply)
    }
}

/// Ends runs. An end that was sent before has the same status in the history.
async fn end_runs<DB: Database>(conn: &mut DB::Connection, endings: &[Arc<(Claim, End)>]) -> Reply<Vec<bool>> {
    let within = endings.len() > 1;
    let end_each = async |conn: &mut DB::Connection| {
        let mut stood = Vec::with_capacity(endings.len());
        for ending in endings {
            stood.push(DB::end_run(conn, &ending.0, &ending.1, within).await?);
        }
        Ok(Some(stood))
    };
    let ended = if within { in_transaction::<DB, _>(conn, end_each).await } else { end_each(conn).await };
    let mut stood = ended?.unwrap_or_default();
    for (stood, ending) in stood.iter_mut().zip(endings) {
        let (claim, End { slot, attempt, status, .. }) = &**ending;
        *stood = *stood || DB::has_ended(conn, claim, *slot, *attempt, status).await?;
    }
    Ok(stood)
}

#[cfg(test)]
#[cfg(feature = "sqlite")]
mod tests {
    use chrono::{DateTime, TimeDelta};
    use sqlx::{Connection as _, Sqlite, SqliteConnection};
    use uuid::Uuid;

    use super::*;
    use crate::{
        key::{Holder, Token},
        store::{
            schedule::Times,
            schema::{Part, Schema, SchemaStore as _},
        },
    };

    /// Returns a connection to a database in which these schedules run, and the ends of the runs.
    async fn running(names: [&str; 3]) -> (SqliteConnection, Vec<Arc<(Claim, End)>>) {
        let mut conn = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        Sqlite::alter(&mut conn, &Sqlite::steps(&Schema::empty(), Part::Schedules)).await.unwrap();
        let (holder, slot) = (Holder::new(Uuid::new_v4()), DateTime::UNIX_EPOCH);
        let insert =
            "INSERT INTO t_resource_schedule (name, spec, zone, slot, due_at, run_slot, attempt, token, holder)
                      VALUES (?, 'every 1m', 'UTC', 0, 0, 0, 1, 1, ?)";
        let mut endings = Vec::new();
        for name in names {
            sqlx::query(insert).bind(name).bind(*holder.as_uuid()).execute(&mut conn).await.unwrap();
            let key = Key::new(name).unwrap();
            let times = Times { name: key.clone(), spec: "every 1m".into(), zone: "UTC".into() };
            let (next, pause) = (Some(slot + TimeDelta::minutes(1)), TimeDelta::zero());
            let (error, output) = (None, None);
            let end = End { times, slot, attempt: 1, missed: 0, status: "S", error, next, pause, output };
            endings.push(Arc::new((Claim { key, holder, token: Token::new(1) }, end)));
        }
        (conn, endings)
    }

    async fn recorded(conn: &mut SqliteConnection) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM t_resource_schedule_run").fetch_one(conn).await.unwrap()
    }

    #[tokio::test]
    async fn each_end_gets_its_own_reply() {
        let (mut conn, endings) = running(["a", "b", "c"]).await;
        sqlx::raw_sql("UPDATE t_resource_schedule SET token = 2 WHERE name = 'b'").execute(&mut conn).await.unwrap();
        assert_eq!(end_runs::<Sqlite>(&mut conn, &endings).await.unwrap(), [true, false, true]);
        assert_eq!(end_runs::<Sqlite>(&mut conn, &endings).await.unwrap(), [true, false, true], "sent again");
        assert_eq!(recorded(&mut conn).await, 2);
    }

    #[tokio::test]
    async fn ends_are_one_transaction() {
        let (mut conn, endings) = running(["a", "b", "c"]).await;
        let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON t_resource_schedule_run WHEN NEW.name = 'c'
                      BEGIN SELECT RAISE(ABORT, 'refused'); END";
        sqlx::raw_sql(refuse).execute(&mut conn).await.unwrap();
        assert!(end_runs::<Sqlite>(&mut conn, &endings).await.is_err());
        assert_eq!(recorded(&mut conn).await, 0);
        assert_eq!(end_runs::<Sqlite>(&mut conn, &endings[..2]).await.unwrap(), [true, true], "the session is usable");
        assert_eq!(recorded(&mut conn).await, 2);
    }
}
