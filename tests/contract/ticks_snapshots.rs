//! Orders that are given while a statement of a run is being carried out on PostgreSQL, which has
//! begun to read before.

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, eventually, pool};
use rowlock::{Schedules, jobs::TickOutcome};
use sqlx::Pool;

use crate::{
    ticks::{SHORT, due, idle, instance, told},
    ticks_orders::{due_too_late, stopped_by},
};

harness::tests!(postgres[DIRECT](
    a_skip_while_a_claim_is_carried_out_is_obeyed,
    a_stop_while_ticks_are_skipped_is_obeyed
));

/// A user whose statements wait before they lock a row of a schedule, while a lock is held. At a
/// row for which the condition holds, they do not.
struct Slow<DB: TestDatabase> {
    role: String,
    pool: Pool<DB>,
}

impl<DB: TestDatabase> Slow<DB> {
    async fn new(db: &TestDb<DB>, unless: &str) -> Self {
        let role = format!("rowlock_{:08x}", fastrand::u32(..));
        for statement in [
            format!("CREATE ROLE {role}"),
            format!("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"),
            format!("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}"),
            "CREATE FUNCTION waits() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1);
                 RETURN true;
             END $$"
                .to_owned(),
            "CREATE POLICY read ON t_resource_schedule FOR SELECT USING (true)".to_owned(),
            "CREATE POLICY add ON t_resource_schedule FOR INSERT WITH CHECK (true)".to_owned(),
            format!(
                "CREATE POLICY lock ON t_resource_schedule FOR UPDATE USING ({unless} OR waits()) WITH CHECK (true)"
            ),
            "ALTER TABLE t_resource_schedule ENABLE ROW LEVEL SECURITY".to_owned(),
        ] {
            db.execute(&statement).await;
        }
        let separator = if db.url.contains('?') { '&' } else { '?' };
        let pool = pool::<DB>(&format!("{}{separator}options=-c%20role%3D{role}", db.url), 4).await;
        Self { role, pool }
    }

    fn schedules(&self) -> Schedules<DB> {
        Schedules::new(self.pool.clone()).label("slow").poll_interval(SHORT).time_limit(PATIENCE)
    }

    /// Waits until a statement of the user waits.
    async fn waits(db: &TestDb<DB>, text: &str) {
        let waiting = format!(
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'
                 AND query LIKE '%{text}%'"
        );
        eventually("a statement waits", || async { db.number(&waiting).await > Some(0) }).await;
    }

    async fn remove(self, db: &TestDb<DB>) {
        self.pool.close().await;
        db.execute(&format!("DROP OWNED BY {}", self.role)).await;
        db.execute(&format!("DROP ROLE {}", self.role)).await;
    }
}

/// The row is locked until the claim has begun, so that it is not claimed before.
async fn a_skip_while_a_claim_is_carried_out_is_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, slow) = (due(&db, "k").await, Slow::new(&db, "false").await);
    let mut row = db.pool.begin().await.unwrap();
    DB::execute_on(&mut row, "UPDATE t_resource_schedule SET paused = paused").await.unwrap();
    let running = slow.schedules().on(schedule, async |_| Ok::<_, &str>(())).start().await.unwrap();
    let mut gate = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut gate, "SELECT pg_advisory_lock(1)").await.unwrap();
    Slow::waits(&db, "due AS MATERIALIZED").await;
    row.rollback().await.unwrap();
    instance(&db, "alice").skip("k").await.unwrap();
    DB::execute_on(&mut gate, "SELECT pg_advisory_unlock(1)").await.unwrap();
    eventually("it is run, or skipped", || async { !told(&db, "k").await.is_empty() }).await;
    assert_eq!(told(&db, "k").await, "M0(1)");
    assert!(running.shutdown(PATIENCE).await);
    slow.remove(&db).await;
}

async fn a_stop_while_ticks_are_skipped_is_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, slow) = (due_too_late(&db, "k").await, Slow::new(&db, "holder IS NULL").await);
    let mut gate = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut gate, "SELECT pg_advisory_lock(1)").await.unwrap();
    let own = slow.schedules().on(schedule.clone(), async |_| Ok::<_, &str>(()));
    let run = harness::spawn(async move { own.try_tick("k").await });
    Slow::waits(&db, "holder = $2 AND token = $3").await;
    let is_stopped = instance(&db, "alice").stop("k").await.unwrap();
    DB::execute_on(&mut gate, "SELECT pg_advisory_unlock(1)").await.unwrap();
    assert!(is_stopped);
    assert_eq!(run.await.unwrap().unwrap(), TickOutcome::HandedBack);
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), stopped_by("alice"));
    assert_eq!(told(&db, "k").await, "F1");
    slow.remove(&db).await;
}
