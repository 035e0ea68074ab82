//! The functions in SQL on rows that another program or a later claim has changed, and what they
//! leave in a row.

use std::{collections::BTreeSet, time::Duration};

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use harness::{DIRECT, PATIENCE, Table, TestDb, acquired};
use rowlock::{Status, admin::ListOptions, leases::Holder};
use sqlx::{MySqlConnection, PgConnection, Row as _, mysql::MySqlRow, postgres::PgRow};
use tokio::time::timeout;
use uuid::Uuid;

use crate::{
    article::{self, Program},
    functions::{Answer, Ask, Functions, settings},
    functions_promises::{ask, change, installed},
    neighbours::whole,
    rules::{self, Verdict, judge},
    rules_table::{HOLDER, cells, row_of, write},
};

harness::tests!(
    servers(
        a_claim_that_another_program_overwrites_is_lost,
        a_claim_on_the_articles_own_table_that_another_program_overwrites_is_lost,
        every_cell_with_the_asker_in_the_row,
        every_cell_on_the_articles_own_table_with_the_asker_in_the_row,
        a_claim_stands_under_its_own_token_alone,
        a_late_end_of_a_lost_claim_says_lost,
        tokens_grow_and_never_fall,
        a_release_writes_its_time,
        a_new_row_keeps_the_minutes_of_the_interval,
        the_list_is_that_of_the_lock_in_every_state
    ),
    postgres[DIRECT](each_end_of_a_claim_notifies)
);

/// A token that the clock reaches in the year 2096.
const AHEAD: i64 = 4_000_000_000_000_000;

/// A row of `rowlock_list`.
#[derive(Debug, PartialEq)]
pub struct Listed {
    key: String,
    state: String,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    by: String,
    holder: Option<Uuid>,
    token: i64,
    ended: Option<DateTime<Utc>>,
    status: String,
}

/// The list with all its columns.
pub trait Lists: Functions {
    fn whole_list(conn: &mut Self::Connection) -> impl Future<Output = Result<Vec<Listed>, sqlx::Error>> + Send;
}

impl Lists for sqlx::Postgres {
    async fn whole_list(conn: &mut PgConnection) -> Result<Vec<Listed>, sqlx::Error> {
        let rows = sqlx::query("SELECT * FROM rowlock_list()").fetch_all(conn).await?;
        let listed = |row: &PgRow| -> Result<Listed, sqlx::Error> {
            Ok(Listed {
                key: row.try_get("key")?,
                state: row.try_get("state")?,
                since: row.try_get("since")?,
                until: row.try_get("until")?,
                by: row.try_get("by")?,
                holder: row.try_get("holder")?,
                token: row.try_get("token")?,
                ended: row.try_get("ended")?,
                status: row.try_get("status")?,
            })
        };
        rows.iter().map(listed).collect()
    }
}

impl Lists for sqlx::MySql {
    async fn whole_list(conn: &mut MySqlConnection) -> Result<Vec<Listed>, sqlx::Error> {
        let rows = sqlx::query("CALL rowlock_list()").fetch_all(conn).await?;
        let listed = |row: &MySqlRow| -> Result<Listed, sqlx::Error> {
            let time = |name: &str| -> Result<Option<DateTime<Utc>>, sqlx::Error> {
                Ok(row.try_get::<Option<NaiveDateTime>, _>(name)?.map(|time| time.and_utc()))
            };
            let holder: Option<String> = row.try_get("holder")?;
            Ok(Listed {
                key: row.try_get("key")?,
                state: row.try_get("state")?,
                since: time("since")?,
                until: time("until")?,
                by: row.try_get("by")?,
                holder: holder.map(|holder| Uuid::parse_str(&holder).unwrap()),
                token: row.try_get("token")?,
                ended: time("ended")?,
                status: row.try_get("status")?,
            })
        };
        rows.iter().map(listed).collect()
    }
}

/// Each change of the claim says that it is lost, and leaves the row as it is.
async fn assert_lost<DB: Functions>(db: &TestDb<DB>, key: &str, claim: &Answer, context: &str) {
    let before = whole(db, key).await;
    for what in ["renew", "release", "abandon", "put_back"] {
        assert_eq!(change(&db.pool, what, key, claim, None).await, "lost", "{what}: {context}");
    }
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let mut conn = db.pool.acquire().await.unwrap();
    let confirmed = DB::call_change(&mut conn, "confirm", key, holder, token, None).await;
    assert!(confirmed.as_ref().is_err_and(|error| error.to_string().contains("is lost")), "{confirmed:?}: {context}");
    assert_eq!(whole(db, key).await, before, "{context}");
}

async fn a_claim_that_another_program_overwrites_is_lost<DB: Functions>(db: TestDb<DB>) {
    overwritten(db, Table::Ours).await;
}

async fn a_claim_on_the_articles_own_table_that_another_program_overwrites_is_lost<DB: Functions>(db: TestDb<DB>) {
    article::put(&db, Table::Articles).await;
    overwritten(db, Table::Articles).await;
}

/// A program that does not check the holder unlocks the row. In the first cases another one locks
/// it: a moment later, in the same second, and with the time of the unlock erased.
async fn overwritten<DB: Functions>(db: TestDb<DB>, table: Table) {
    installed(&db).await;
    let program = Program::new(db.pool.clone(), db.server.name, TimeDelta::zero()).await;
    let later = program.at(TimeDelta::minutes(61));
    let moved = format!("begin_time = {}", DB::begun(table, -5_000));
    let erased = format!("{moved}, end_time = NULL");
    for (locks, set) in [
        (true, moved.as_str()),
        (true, "begin_time = claimed_at"),
        (true, erased.as_str()),
        (false, "status = 'S'"),
        (false, "end_time = NULL"),
    ] {
        db.execute("DELETE FROM t_resource_lock").await;
        let asked = Ask { holder: Some(Holder::unique()), ..Ask::of("k") };
        let claim = ask(&db.pool, &asked).await;
        program.give("k", "S").await;
        if locks {
            assert_eq!(later.take("k").await, article::Answer::Taken);
        }
        db.set("k", set).await;
        let context = format!("{set}, locked: {locks}, on {table:?}");
        assert_lost(&db, "k", &claim, &context).await;
        // Nor is it the same claim for a request that is repeated.
        let again = ask(&db.pool, &asked).await;
        if locks {
            assert_eq!((again.granted, again.by.as_deref()), (false, Some("10.0.0.7")), "{context}");
            assert_eq!(again.reason.as_deref(), Some("held_by_another_program"), "{context}");
        } else {
            assert!(again.granted && again.token > claim.token && again.previous.is_none(), "{context}: {again:?}");
        }
    }
}

async fn every_cell_with_the_asker_in_the_row<DB: Functions>(db: TestDb<DB>) {
    every_own_cell(db, Table::Ours).await;
}

async fn every_cell_on_the_articles_own_table_with_the_asker_in_the_row<DB: Functions>(db: TestDb<DB>) {
    article::put(&db, Table::Articles).await;
    every_own_cell(db, Table::Articles).await;
}

/// A claim that stands is granted again to its holder, and no other row is because it names the
/// holder.
async fn every_own_cell<DB: Functions>(db: TestDb<DB>, table: Table) {
    installed(&db).await;
    let asker = Holder::parse(HOLDER).unwrap();
    let mut conn = db.pool.acquire().await.unwrap();
    let (mut same, mut others) = (0, 0);
    for cell in cells().into_iter().flatten() {
        for terms in settings() {
            let now = Utc::now();
            let row = row_of(&cell, now);
            if row.holder.is_none() {
                continue;
            }
            let verdict = judge(Some(&row), now, asker, &terms);
            db.execute("DELETE FROM t_resource_lock").await;
            write(&db, &["k"], &cell, TimeDelta::zero(), table).await;
            let rules = if terms.rules == rules::Rules::Article { "article" } else { "recover" };
            let min_interval = terms.min_interval.to_std().unwrap();
            let asked = Ask { min_interval, rules, holder: Some(asker), ..Ask::of("k") };
            let answer = DB::call_try_acquire(&mut conn, &asked).await.unwrap();
            let context = format!("{cell:?} under {terms:?}: rules.rs says {verdict:?}, the function {answer:?}");
            match &verdict {
                Verdict::Same => {
                    assert_eq!(
                        (answer.granted, answer.token, answer.holder),
                        (true, Some(7), Some(asker)),
                        "{context}"
                    );
                    same += 1;
                }
                Verdict::Refuse(reason, _) => {
                    assert_eq!((answer.granted, answer.reason.as_deref()), (false, Some(reason.name())), "{context}");
                    others += 1;
                }
                _ => panic!("{context}"),
            }
        }
    }
    assert!(same > 0 && others > 0, "{same} claims that stand, {others} other rows");
}

/// A holder may make several claims, one after the other.
async fn a_claim_stands_under_its_own_token_alone<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let asked = Ask { holder: Some(Holder::unique()), ..Ask::of("k") };
    let first = ask(&db.pool, &asked).await;
    assert_eq!(change(&db.pool, "release", "k", &first, None).await, "done");
    let second = ask(&db.pool, &asked).await;
    assert!(second.granted && second.holder == first.holder && second.token > first.token, "{second:?}");
    assert_lost(&db, "k", &first, "the first of two claims").await;
    for what in ["renew", "release"] {
        assert_eq!(change(&db.pool, what, "k", &second, None).await, "done", "{what}");
    }
}

/// Also if the key is free again, as after an end that was carried out.
async fn a_late_end_of_a_lost_claim_says_lost<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let forced = ask(&db.pool, &Ask::of("forced")).await;
    db.lock().force_release("forced", Status::Succeeded).await.unwrap().unwrap();
    assert_lost(&db, "forced", &forced, "released by force").await;

    let over = ask(&db.pool, &Ask::of("over")).await;
    db.set("over", &format!("expires_at = {}", DB::ago(1000))).await;
    let next = ask(&db.pool, &Ask::of("over")).await;
    assert_eq!(next.previous.as_ref().map(|previous| previous.0), over.token);
    assert_eq!(change(&db.pool, "release", "over", &next, None).await, "done");
    assert_lost(&db, "over", &over, "taken over, and released by the next holder").await;
}

/// If a clock was set back, and if the row was deleted.
async fn tokens_grow_and_never_fall<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let ahead = format!("token = {AHEAD}");
    let free = ask(&db.pool, &Ask::of("free")).await;
    assert_eq!(change(&db.pool, "release", "free", &free, None).await, "done");
    db.set("free", &ahead).await;
    let next = ask(&db.pool, &Ask::of("free")).await;
    assert!(next.granted && next.token > Some(AHEAD), "{next:?}");

    ask(&db.pool, &Ask::of("over")).await;
    db.set("over", &format!("{ahead}, expires_at = {}", DB::ago(1000))).await;
    let next = ask(&db.pool, &Ask::of("over")).await;
    assert_eq!(next.previous.as_ref().map(|previous| previous.0), Some(AHEAD));
    assert!(next.token > Some(AHEAD), "{next:?}");

    let first = ask(&db.pool, &Ask::of("forgotten")).await;
    assert_eq!(change(&db.pool, "release", "forgotten", &first, None).await, "done");
    db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'forgotten'").await;
    let next = ask(&db.pool, &Ask::of("forgotten")).await;
    assert!(next.granted && next.token > first.token, "{first:?} {next:?}");
}

async fn a_release_writes_its_time<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    for status in ["S", "F"] {
        let claim = ask(&db.pool, &Ask::of(status)).await;
        assert_eq!(db.lock().inspect(status).await.unwrap().unwrap().ended, None);
        assert_eq!(change(&db.pool, "release", status, &claim, Some(status)).await, "done");
        let row = db.lock().inspect(status).await.unwrap().unwrap();
        let took = row.ended.expect("the run has ended") - row.since.unwrap();
        assert!((0..600).contains(&took.num_seconds()), "{took}");
    }
}

/// Other programs leave the key closed for so long, and `forget` keeps the row.
async fn a_new_row_keeps_the_minutes_of_the_interval<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    for (seconds, minutes) in [(0, "60"), (3600, "60"), (3601, "61"), (7200, "120")] {
        let (ours, theirs) = (format!("lock {seconds}"), format!("function {seconds}"));
        let min_interval = Duration::from_secs(seconds);
        acquired(db.lock().min_interval(min_interval).try_acquire(&ours).await).release().await.unwrap();
        assert!(ask(&db.pool, &Ask { min_interval, ..Ask::of(&theirs) }).await.granted);
        for key in [ours, theirs] {
            let kept = db.cell("time", &format!("t_resource_lock WHERE key_resource = '{key}'")).await;
            assert_eq!(kept.as_deref(), Some(minutes), "{key}");
        }
    }
}

async fn the_list_is_that_of_the_lock_in_every_state<DB: Lists>(db: TestDb<DB>) {
    installed(&db).await;
    for (number, cell) in cells().iter().flatten().enumerate() {
        write(&db, &[&format!("{number:03}")], cell, TimeDelta::zero(), Table::Ours).await;
    }
    let listed = DB::whole_list(&mut *db.pool.acquire().await.unwrap()).await.unwrap();
    let ours = db.lock().list(&ListOptions::default().limit(1000)).await.unwrap();
    let states: BTreeSet<_> = ours.iter().map(|row| row.state.name()).collect();
    assert_eq!(states.len(), 6, "every state came up: {states:?}");
    let ours = ours.into_iter().map(|row| Listed {
        key: row.key,
        state: row.state.name().to_owned(),
        since: row.since,
        until: row.until,
        by: row.by,
        holder: row.holder.map(|holder| *holder.as_uuid()),
        token: row.token.get(),
        ended: row.ended,
        status: row.status,
    });
    assert_eq!(listed, ours.collect::<Vec<_>>());
}

/// A task that waits in a lock marks the row.
async fn each_end_of_a_claim_notifies<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut heard = sqlx::postgres::PgListener::connect(&db.url).await.unwrap();
    heard.listen("rowlock").await.unwrap();
    for what in ["release", "abandon", "put_back"] {
        let claim = ask(&db.pool, &Ask::of(what)).await;
        db.set(what, "awaited = true").await;
        assert_eq!(change(&db.pool, what, what, &claim, None).await, "done");
        let told = timeout(PATIENCE, heard.recv()).await.unwrap_or_else(|_| panic!("{what} notifies"));
        assert_eq!(told.unwrap().payload(), what);
    }
}
