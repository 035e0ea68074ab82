//! Texts of schedules that fail in the middle, and claims of rows that change after the look.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    key::{Claim, Holder, Key},
    store::{
        Reply,
        instances::{InstanceStore as _, TimesChange},
        schedule::{DueReply, DueRequest, End, Known, ListedSchedule, Pass, ScheduleStore as _, Times},
        schedule_seen::SeenStore as _,
        sqlite::for_tests::{execute, tables},
    },
};

const SLOT: DateTime<Utc> = DateTime::UNIX_EPOCH;

fn times() -> Times {
    Times { name: Key::new("report").unwrap(), spec: "every 1m".into(), zone: "UTC".into() }
}

fn known() -> Known {
    Known { times: times(), lease: TimeDelta::seconds(60) }
}

async fn claim_due(conn: &mut SqliteConnection, holder: Holder) -> Reply<DueReply> {
    let ask = DueRequest { known: &[known()], holder, label: "test", most: 1, not_after: None };
    Sqlite::claim_due(conn, &ask).await
}

/// Returns a connection to a database with a schedule that is due.
async fn due() -> SqliteConnection {
    let mut conn = tables().await;
    assert!(Sqlite::change_times(&mut conn, &TimesChange::creation(times(), SLOT)).await.unwrap());
    conn
}

/// Returns a connection and the claim of a run, which no statement can change any more.
async fn claimed() -> (SqliteConnection, Claim) {
    let mut conn = due().await;
    let holder = Holder::unique();
    let row = claim_due(&mut conn, holder).await.unwrap().claimed.remove(0);
    let refused = "
        UPDATE t_resource_schedule SET due_at = 0;
        CREATE TRIGGER refused BEFORE UPDATE ON t_resource_schedule BEGIN SELECT RAISE(ABORT, 'refused'); END";
    execute(&mut conn, refused).await;
    (conn, Claim { key: row.name, holder, token: row.token })
}

/// Asserts that the statement was refused, that nothing of its text stands, and that its
/// transaction is over.
async fn assert_undone<T>(conn: &mut SqliteConnection, reply: Reply<T>) {
    let error = reply.err().expect("the trigger refuses it");
    assert!(error.to_string().contains("refused"), "{error}");
    let runs = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM t_resource_schedule_run");
    execute(conn, "BEGIN").await;
    assert_eq!(runs.fetch_one(&mut *conn).await.unwrap(), 0);
    execute(conn, "ROLLBACK").await;
}

#[tokio::test]
async fn an_end_that_is_refused_is_undone() {
    let (mut conn, claim) = claimed().await;
    let times = times();
    let end = End {
        times: &times,
        slot: SLOT,
        attempt: 1,
        missed: 0,
        status: "S",
        error: None,
        next: None,
        pause: TimeDelta::zero(),
        output: None,
    };
    let reply = Sqlite::end_run(&mut conn, &claim, &end, false).await;
    assert_undone(&mut conn, reply).await;
}

#[tokio::test]
async fn a_move_that_is_refused_is_undone() {
    let (mut conn, claim) = claimed().await;
    let to = SLOT + TimeDelta::minutes(1);
    let pass = Pass { times: &times(), from: SLOT, to, runs: false, missed: 0, skipped: 1, error: None };
    let reply = Sqlite::skip_ticks(&mut conn, &claim, &pass).await;
    assert_undone(&mut conn, reply).await;
}

#[tokio::test]
async fn a_claim_that_takes_over_and_is_refused_is_undone() {
    let (mut conn, _) = claimed().await;
    let reply = claim_due(&mut conn, Holder::unique()).await;
    assert_undone(&mut conn, reply).await;
}

/// Returns a claim during which other times took effect. They left the row at the slot after it.
async fn claimed_under_other_times() -> (SqliteConnection, Claim) {
    let mut conn = due().await;
    let holder = Holder::unique();
    let row = claim_due(&mut conn, holder).await.unwrap().claimed.remove(0);
    let (other, slot) = (Times { spec: "every 2m".into(), ..times() }, SLOT + TimeDelta::minutes(1));
    let seen = ListedSchedule { run_slot: Some(SLOT), attempt: 1, ..ListedSchedule::unrun(times(), SLOT) };
    let change = TimesChange { seen: Some(Box::new(seen)), ..TimesChange::creation(other, slot) };
    assert!(Sqlite::change_times(&mut conn, &change).await.unwrap());
    (conn, Claim { key: row.name, holder, token: row.token })
}

async fn has(conn: &mut SqliteConnection, condition: &str) -> bool {
    let row = sqlx::AssertSqlSafe(format!("SELECT {condition} FROM t_resource_schedule"));
    sqlx::query_scalar::<_, bool>(row).fetch_one(conn).await.unwrap()
}

/// What begins afresh leaves a run alone until the history has it, whatever the clock says.
#[tokio::test]
async fn a_run_is_cleared_once_it_is_recorded() {
    let mut conn = due().await;
    let claim = claim_due(&mut conn, Holder::unique()).await.unwrap().claimed.remove(0);
    let seen = ListedSchedule { run_slot: Some(SLOT), attempt: 1, ..ListedSchedule::unrun(times(), SLOT) };
    let seen = Some(Box::new(seen));
    let change = TimesChange { seen, afresh: true, ..TimesChange::creation(times(), SLOT) };
    assert!(Sqlite::change_times(&mut conn, &change).await.unwrap());
    assert!(has(&mut conn, "attempt = 1 AND holder IS NOT NULL AND run_slot = 0").await);
    execute(&mut conn, "UPDATE t_resource_schedule SET due_at = 1").await;
    assert!(Sqlite::change_times(&mut conn, &change).await.unwrap());
    assert!(has(&mut conn, "attempt = 0 AND holder IS NULL AND due_at = 0 AND run_slot = 0").await);
    let lost = "SELECT count(*) FROM t_resource_schedule_run WHERE status = 'L' AND token = ?1";
    let lost = sqlx::query_scalar::<_, i64>(lost).bind(claim.token.get());
    assert_eq!(lost.fetch_one(&mut conn).await.unwrap(), 1);
}

#[tokio::test]
async fn a_claim_that_is_put_back_after_other_times_took_effect_is_due() {
    let (mut conn, claim) = claimed_under_other_times().await;
    Sqlite::put_back(&mut conn, claim.holder, Holder::unique(), &[times().name]).await.unwrap();
    assert!(has(&mut conn, "slot = 0 AND due_at = 0 AND attempt = 0 AND holder IS NULL AND spec = 'every 2m'").await);
}

#[tokio::test]
async fn a_move_after_other_times_took_effect_is_refused() {
    let (mut conn, claim) = claimed_under_other_times().await;
    let to = SLOT + TimeDelta::minutes(5);
    for runs in [true, false] {
        let pass = Pass { times: &times(), from: SLOT, to, runs, missed: 5, skipped: 0, error: None };
        assert!(!Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
    }
    assert!(has(&mut conn, "slot = 60000000 AND run_slot = 0 AND attempt = 1 AND missed = 0").await);
}

/// A claim, and one that takes over, after each change that another statement may make after the
/// look.
#[tokio::test]
async fn a_row_that_has_changed_since_the_look_is_not_claimed() {
    let changes = [
        ("", true),
        ("version = 2", true),
        ("missed = 1", true),
        ("spec = 'every 2m'", false),
        ("zone = 'Asia/Tokyo'", false),
        ("token = token + 1", false),
        ("slot = slot + 1", false),
        ("attempt = attempt + 1", false),
        ("due_at = due_at + 1", false),
        ("paused = 1", false),
    ];
    for (change, is_claimed) in changes {
        for takes_over in [false, true] {
            let mut conn = due().await;
            let (known, mut runs) = ([known()], 0);
            let holder = Holder::unique();
            let mut ask = DueRequest { known: &known, holder, label: "a", most: 1, not_after: None };
            if takes_over {
                Sqlite::claim_due(&mut conn, &ask).await.unwrap();
                execute(&mut conn, "UPDATE t_resource_schedule SET due_at = 0").await;
                ask.holder = Holder::unique();
                runs = 1;
            }
            let seen = Sqlite::look_for_due(&mut conn, &ask).await.unwrap().remove(0);
            if !change.is_empty() {
                execute(&mut conn, &format!("UPDATE t_resource_schedule SET {change}")).await;
            }
            let claimed = if takes_over {
                Sqlite::take_over(&mut conn, &ask, &seen).await.unwrap()
            } else {
                Sqlite::take_free(&mut conn, &ask, &[&seen], known[0].lease).await.unwrap() == [true]
            };
            let holder = "SELECT count(*) FROM t_resource_schedule WHERE holder = ?";
            let holder = sqlx::query_scalar::<_, i64>(holder).bind(*ask.holder.as_uuid());
            let held = holder.fetch_one(&mut conn).await.unwrap() == 1;
            let lost = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM t_resource_schedule_run");
            let lost = lost.fetch_one(&mut conn).await.unwrap();
            let expected = (is_claimed, is_claimed, if is_claimed { runs } else { 0 });
            assert_eq!((claimed, held, lost), expected, "{change}, takes over: {takes_over}");
        }
    }
}
