//! A batched statement fails: the server ends its connection and says so, or another transaction
//! changed one of its rows at an isolation level that does not allow for that. Each request in the
//! batch is still answered as if it had been sent alone.

use std::time::Duration;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::{Attempt, Error, Lease, LeaseLock, Reason, Status};
use sqlx::Pool;
use tokio::{
    join,
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    batched::{all, begin, names, numbered, released, releases, set_up, together, tries},
    isolation::pool_of_at,
    line::{Line, standing, unknown},
};

harness::tests!(
    mysql_and_mariadb(several_are_freed_together_or_as_they_are_told_apart),
    mariadb(a_concurrent_change_at_snapshot_isolation),
    postgres(a_claim_that_failed_is_repeated_once_its_transaction_has_ended),
    servers[DIRECT](
        claims_whose_connection_the_server_ends_are_all_granted,
        releases_whose_connection_the_server_ends_are_all_done
    ),
    servers(
        releases_whose_replies_are_lost_are_done_or_unknown,
        a_concurrent_change_at_read_committed,
        a_concurrent_change_at_repeatable_read,
        a_concurrent_change_at_serializable,
        a_rival_at_repeatable_read,
        a_rival_at_serializable
    )
);

const KEYS: [&str; 4] = ["first", "k", "touched", "other"];

/// A connection that is closed on drop, and so releases its locks.
async fn alone<DB: TestDatabase>(db: &TestDb<DB>) -> DB::Connection {
    db.pool_of(1).await.acquire().await.unwrap().detach()
}

/// While the gate is closed, an update of the row of `k` waits at it.
struct Gate<'a, DB: TestDatabase> {
    db: &'a TestDb<DB>,
    keeper: DB::Connection,
}

impl<'a, DB: TestDatabase> Gate<'a, DB> {
    async fn closed(db: &'a TestDb<DB>) -> Self {
        let (trigger, close): (&[&str], _) = match db.server.name {
            "postgres" => (
                &[
                    "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$",
                    "CREATE TRIGGER gate BEFORE UPDATE ON t_resource_lock FOR EACH ROW WHEN (NEW.key_resource = 'k') EXECUTE FUNCTION gate()",
                ],
                "SELECT pg_advisory_lock(1)",
            ),
            _ => (
                &[
                    "CREATE TRIGGER gate BEFORE UPDATE ON t_resource_lock FOR EACH ROW BEGIN IF NEW.key_resource = 'k' THEN DO GET_LOCK(DATABASE(), 60); DO RELEASE_LOCK(DATABASE()); END IF; END",
                ],
                "SELECT GET_LOCK(DATABASE(), 0)",
            ),
        };
        for sql in trigger {
            db.execute(sql).await;
        }
        let mut keeper = alone(db).await;
        DB::execute_on(&mut keeper, close).await.unwrap();
        Self { db, keeper }
    }

    /// The session that waits at the gate.
    async fn waiting(&self) -> Option<i64> {
        self.db
            .number(match self.db.server.name {
                "postgres" => "SELECT max(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'",
                // MySQL's own process list fails while a statement runs that contains bytes that
                // are not text. MariaDB has no other list.
                "mysql" => "SELECT CAST(MAX(processlist_id) AS SIGNED) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state = 'User lock'",
                _ => "SELECT CAST(MAX(id) AS SIGNED) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock'",
            })
            .await
    }

    /// Lets the server end the session that waits at the gate, and opens the gate when that is
    /// done.
    async fn ends_who_waits(mut self) {
        eventually("a task waits", || async { self.waiting().await.is_some() }).await;
        let session = self.waiting().await.unwrap();
        let postgres = self.db.server.name == "postgres";
        let end = if postgres { format!("SELECT pg_terminate_backend({session})") } else { format!("KILL {session}") };
        self.db.execute(&end).await;
        eventually("it has ended", || async { self.waiting().await != Some(session) }).await;
        let open = if postgres { "SELECT pg_advisory_unlock(1)" } else { "SELECT RELEASE_LOCK(DATABASE())" };
        DB::execute_on(&mut self.keeper, open).await.unwrap();
    }
}

async fn assert_theirs<DB: TestDatabase>(db: &TestDb<DB>, leases: &[Lease<DB>]) {
    for lease in leases {
        let entry = db.lock().inspect(lease.key().as_str()).await.unwrap().unwrap();
        assert_eq!((entry.token, entry.holder), (lease.token(), Some(lease.claim().holder)), "{lease:?}");
        assert!(lease.taken_over_from().is_none(), "{lease:?}");
    }
}

async fn claims_whose_connection_the_server_ends_are_all_granted<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, lock) = set_up(&db, &KEYS.map(String::from)).await;
    let gate = Gate::closed(&db).await;
    let (answers, ()) = join!(together(&pool, tries(&lock, KEYS)), gate.ends_who_waits());
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    assert_eq!(standing(&db).await, 4);
    assert_theirs(&db, &leases).await;
    released(&pool, leases, |_| Status::Succeeded).await;
    assert_eq!(standing(&db).await, 0, "no claim is left without a holder");
}

async fn releases_whose_connection_the_server_ends_are_all_done<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, lock) = set_up(&db, &KEYS.map(String::from)).await;
    let leases = together(&pool, tries(&lock, KEYS)).await.into_iter().map(acquired).collect();
    let gate = Gate::closed(&db).await;
    join!(released(&pool, leases, |_| Status::Failed), gate.ends_who_waits());
    assert_eq!(standing(&db).await, 0, "each of them said that it was done");
    for key in KEYS {
        assert_eq!(db.column(key, "status").await.as_deref(), Some("F"), "{key}");
    }
}

/// The releases are executed, and their replies are lost. When they are sent again, another client
/// holds two of the keys.
async fn releases_whose_replies_are_lost_are_done_or_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    for key in KEYS {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
    }
    let line = Line::with_free_row(&db, PATIENCE, PATIENCE).await;
    let leases = async || all(tries(&line.lock, KEYS)).await.into_iter().map(acquired).collect();
    // A first round without interference, so that every statement is prepared.
    released(&line.pool, leases().await, |_| Status::Succeeded).await;
    let mut releases = releases(leases().await, |_| Status::Succeeded);
    let taken = line.pool.acquire().await.unwrap();
    assert!(begin(&mut releases).await, "they wait");
    line.proxy.hold_after(Way::Replies, 0);
    drop(taken);
    line.proxy.held(Way::Replies).await;
    eventually("they are done", || async { standing(&db).await == 0 }).await;
    let thief = db.lock();
    let thieves = [acquired(thief.try_acquire("k").await), acquired(thief.try_acquire("touched").await)];
    line.proxy.cut();
    let results = timeout(PATIENCE, all(releases)).await.unwrap();
    let [first, k, touched, other] = <[_; 4]>::try_from(results).unwrap();
    first.unwrap();
    unknown(k);
    unknown(touched);
    other.unwrap();
    assert_eq!(standing(&db).await, 2);
    assert_theirs(&db, &thieves).await;
}

/// Another client's transaction that locks the whole table. The statements of others wait for it
/// after their snapshot has been taken.
struct Elsewhere<'a, DB: TestDatabase> {
    db: &'a TestDb<DB>,
    conn: DB::Connection,
}

impl<'a, DB: TestDatabase> Elsewhere<'a, DB> {
    async fn at_the_table(db: &'a TestDb<DB>) -> Self {
        let mut conn = alone(db).await;
        let sql = match db.server.name {
            "postgres" => "BEGIN; LOCK TABLE t_resource_lock IN SHARE ROW EXCLUSIVE MODE",
            _ => "LOCK TABLES t_resource_lock WRITE",
        };
        DB::execute_on(&mut conn, sql).await.unwrap();
        Self { db, conn }
    }

    /// Runs these statements once the given number of others wait, and ends the transaction.
    async fn does(mut self, waiting: i64, sql: &[String]) {
        let count = match self.db.server.name {
            "postgres" => {
                "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'relation'"
            }
            "mysql" => {
                "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state = 'Waiting for table metadata lock'"
            }
            _ => {
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'Waiting for table metadata lock'"
            }
        };
        eventually("they wait", || async { self.db.number(count).await == Some(waiting) }).await;
        for sql in sql {
            assert_eq!(DB::execute_on(&mut self.conn, sql).await.unwrap(), 1, "{sql}");
        }
        let go = if self.db.server.name == "postgres" { "COMMIT" } else { "UNLOCK TABLES" };
        DB::execute_on(&mut self.conn, go).await.unwrap();
    }
}

fn update(key: &str, set: &str) -> String {
    format!("UPDATE t_resource_lock SET {set} WHERE key_resource = '{key}'")
}

/// A claim by another client.
fn taken<DB: TestDatabase>(key: &str) -> [String; 2] {
    let (holder, now, later) = (DB::uuid("0123456789abcdef0123456789abcdef"), DB::ago(0), DB::ago(-60_000));
    let set = format!(
        "lock_flag = 1, status = 'P', client_ip = 'thief', holder = {holder}, token = token + 1, end_time = NULL, begin_time = {now}, expires_at = {later}"
    );
    [update(key, &set), update(key, "claimed_at = begin_time")]
}

/// Keys with free rows, and a lock on two connections of this level. Each connection has prepared
/// the statements.
async fn level_bed<DB: TestDatabase>(db: &TestDb<DB>, level: &str) -> LeaseLock<DB> {
    for key in KEYS {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
    }
    let pool: Pool<DB> = pool_of_at(db, 2, level).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    let (mut idle, mut used) = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
    for _ in 0..2 {
        drop(used);
        let mut claims = tries(&lock, KEYS);
        begin(&mut claims).await;
        let leases = all(claims).await.into_iter().map(acquired).collect();
        let mut releases = releases(leases, |_| Status::Succeeded);
        begin(&mut releases).await;
        all(releases).await.into_iter().for_each(Result::unwrap);
        used = std::mem::replace(&mut idle, pool.acquire().await.unwrap());
    }
    drop((idle, used));
    eventually("both are idle", || async { pool.num_idle() == 2 }).await;
    lock
}

/// The requests are sent together. Their statement waits until two of the rows have changed.
async fn a_concurrent_change<DB: TestDatabase>(db: TestDb<DB>, level: &str) {
    let lock = level_bed(&db, level).await;
    let touched = db.number("SELECT token + 1 FROM t_resource_lock WHERE key_resource = 'touched'").await;
    let elsewhere = Elsewhere::at_the_table(&db).await;
    let changes = [&taken::<DB>("k")[..], &[update("touched", "token = token + 1")]].concat();
    let mut claims = tries(&lock, KEYS);
    assert!(begin(&mut claims).await, "they wait");
    let (answers, ()) = join!(timeout(PATIENCE, all(claims)), elsewhere.does(1, &changes));
    let mut answers = answers.unwrap();
    let refusal = refused(answers.remove(1));
    assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::Held, "thief"));
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    assert!(Some(leases[1].token().get()) > touched, "after what the row has become");
    assert_theirs(&db, &leases).await;

    let elsewhere = Elsewhere::at_the_table(&db).await;
    let changes = [&taken::<DB>("other")[..], &[update("touched", "client_ip = 'touched'")]].concat();
    let mut releases = releases(leases, |_| Status::Succeeded);
    assert!(begin(&mut releases).await, "they wait");
    let (results, ()) = join!(timeout(PATIENCE, all(releases)), elsewhere.does(1, &changes));
    let results: Vec<Result<(), Error>> = results.unwrap();
    assert!(matches!(results[..], [Ok(()), Ok(()), Err(Error::Lost { .. })]), "{results:?}");
    assert_eq!(standing(&db).await, 2, "the thief's");
}

async fn a_concurrent_change_at_read_committed<DB: TestDatabase>(db: TestDb<DB>) {
    a_concurrent_change(db, "read committed").await;
}

async fn a_concurrent_change_at_repeatable_read<DB: TestDatabase>(db: TestDb<DB>) {
    a_concurrent_change(db, "repeatable read").await;
}

async fn a_concurrent_change_at_serializable<DB: TestDatabase>(db: TestDb<DB>) {
    a_concurrent_change(db, "serializable").await;
}

async fn a_concurrent_change_at_snapshot_isolation<DB: TestDatabase>(db: TestDb<DB>) {
    a_concurrent_change(db, "snapshot isolation").await;
}

/// A key that no other request wants. At PostgreSQL's SERIALIZABLE, rows that other transactions
/// only read conflict: a try may be refused as busy, alone or in a batch, and a request that waits
/// is granted.
async fn had<DB: TestDatabase>(
    db: &TestDb<DB>,
    lock: &LeaseLock<DB>,
    level: &str,
    key: &str,
    attempt: Attempt<Lease<DB>>,
) -> Lease<DB> {
    match attempt {
        Attempt::Refused(refusal)
            if refusal.reason == Reason::Busy && (db.server.name, level) == ("postgres", "serializable") =>
        {
            acquired(lock.acquire(key, PATIENCE).await)
        }
        attempt => acquired(Ok::<_, Error>(attempt)),
    }
}

/// Another lock acquires and releases one of the keys all the time. The requests in a batch
/// with that key are still granted their own.
async fn a_rival<DB: TestDatabase>(db: TestDb<DB>, level: &str) {
    let keys = [numbered(16), vec!["k".to_owned()]].concat();
    for key in &keys {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
    }
    let lock = LeaseLock::builder(pool_of_at::<DB>(&db, 4, level).await).time_limit(PATIENCE).build().unwrap();
    let theirs = LeaseLock::builder(pool_of_at::<DB>(&db, 1, level).await).time_limit(PATIENCE).build().unwrap();
    let over = watch::Sender::new(false);
    let rival = async {
        let mut cycles = 0;
        while !*over.borrow() {
            let lease = acquired(theirs.acquire("k", PATIENCE).await);
            lease.release().await.unwrap();
            cycles += 1;
        }
        cycles
    };
    let rounds = async {
        for _ in 0..30 {
            let mut answers = timeout(PATIENCE, all(tries(&lock, names(&keys)))).await.unwrap();
            let k = answers.pop().unwrap().unwrap();
            let mut leases: Vec<_> = k.acquired().into_iter().collect();
            for (key, answer) in keys.iter().zip(answers) {
                leases.push(had(&db, &lock, level, key, answer.unwrap()).await);
            }
            let releases = timeout(PATIENCE, all(releases(leases, |_| Status::Succeeded)));
            releases.await.unwrap().into_iter().for_each(Result::unwrap);
        }
        over.send_replace(true);
    };
    let (cycles, ()) = join!(rival, rounds);
    assert!(cycles > 0);
    assert_eq!(standing(&db).await, 0);
}

async fn a_rival_at_repeatable_read<DB: TestDatabase>(db: TestDb<DB>) {
    a_rival(db, "repeatable read").await;
}

async fn a_rival_at_serializable<DB: TestDatabase>(db: TestDb<DB>) {
    a_rival(db, "serializable").await;
}

/// The server reports an error before it ends the transaction, which takes long on a busy machine.
/// Another request would skip the rows that are still locked.
async fn a_claim_that_failed_is_repeated_once_its_transaction_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::builder(proxy.pool::<DB>(2)).time_limit(PATIENCE).build().unwrap();
    acquired(lock.acquire("k", PATIENCE).await).release().await.unwrap();
    for sql in [
        "CREATE SEQUENCE claims",
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('claims') = 1 THEN RAISE 'refused once' USING ERRCODE = 'serialization_failure'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER fail BEFORE UPDATE ON t_resource_lock FOR EACH ROW EXECUTE FUNCTION fail()",
    ] {
        db.execute(sql).await;
    }
    proxy.hold_after_error("refused once");
    let lease = proxy.while_held(Way::Replies, lock.try_acquire("k"), async |proxy| {
        sleep(Duration::from_millis(200)).await;
        assert_eq!(db.number("SELECT last_value FROM claims").await, Some(1), "it was sent again");
        proxy.open();
    });
    acquired(lease.await).release().await.unwrap();
}

/// A reply that counts rows does not identify them. A freed key may be claimed by another client
/// before the rows are read again, so no key is freed until the result can be attributed.
async fn several_are_freed_together_or_as_they_are_told_apart<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, PATIENCE, PATIENCE).await;
    let take = || async { line.lock.try_acquire_all(["a", "b"]).await.unwrap().acquired().unwrap() };
    take().await.release().await.unwrap();
    let set = take().await;
    db.take_from("b").await;
    let release = set.release();
    let released = line.held(Way::Requests, 1, release, async |proxy| {
        assert_eq!(standing(&db).await, 2, "nothing is freed by the first statement");
        proxy.open();
    });
    assert!(matches!(released.await, Err(Error::Lost { .. })));
    assert_eq!(standing(&db).await, 1);
    assert_eq!(db.column("b", "client_ip").await.as_deref(), Some("thief"));
}
