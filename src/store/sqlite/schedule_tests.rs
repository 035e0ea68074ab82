//! Texts of schedules that fail in the middle, and claims of rows that change after the look.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    key::{Claim, Holder, Key},
    store::{
        Reply,
        instances::{InstanceStore as _, Order, TimesChange, What},
        schedule::{DueReply, DueRequest, End, Known, ListedSchedule, Pass, ScheduleStore as _, Times},
        schedule_seen::{Seen, SeenStore as _},
        sqlite::for_tests::{execute, tables},
    },
};

const SLOT: DateTime<Utc> = DateTime::UNIX_EPOCH;

pub(super) fn times() -> Times {
    Times { name: Key::new("report").unwrap(), spec: "every 1m".into(), zone: "UTC".into() }
}

fn known() -> Known {
    Known { times: times(), lease: TimeDelta::seconds(60) }
}

pub(super) async fn claim_due(conn: &mut SqliteConnection, not_after: Option<DateTime<Utc>>) -> Reply<DueReply> {
    let ask = DueRequest { known: &[known()], holder: Holder::unique(), label: "test", most: 1, not_after };
    Sqlite::claim_due(conn, &ask).await
}

/// Returns a connection to a database with a schedule that is due.
pub(super) async fn due() -> SqliteConnection {
    let mut conn = tables().await;
    assert!(Sqlite::change_times(&mut conn, &TimesChange::creation(times(), SLOT)).await.unwrap());
    conn
}

/// Returns a connection and the claim of a run, which no statement can change any more.
async fn claimed() -> (SqliteConnection, Claim) {
    let mut conn = due().await;
    let claim = claim_of(&mut conn).await;
    let refused = "
        UPDATE t_resource_schedule SET due_at = 0;
        CREATE TRIGGER refused BEFORE UPDATE ON t_resource_schedule BEGIN SELECT RAISE(ABORT, 'refused'); END";
    execute(&mut conn, refused).await;
    (conn, claim)
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
    let reply = claim_due(&mut conn, None).await;
    assert_undone(&mut conn, reply).await;
}

/// Returns a claim during which other times took effect. They left the row at the slot after it.
async fn claimed_under_other_times() -> (SqliteConnection, Claim) {
    let mut conn = due().await;
    let claim = claim_of(&mut conn).await;
    let (other, slot) = (Times { spec: "every 2m".into(), ..times() }, SLOT + TimeDelta::minutes(1));
    let seen = ListedSchedule { run_slot: Some(SLOT), attempt: 1, ..ListedSchedule::unrun(times(), SLOT) };
    let change = TimesChange { seen: Some(Box::new(seen)), ..TimesChange::creation(other, slot) };
    assert!(Sqlite::change_times(&mut conn, &change).await.unwrap());
    (conn, claim)
}

async fn has(conn: &mut SqliteConnection, condition: &str) -> bool {
    let row = sqlx::AssertSqlSafe(format!("SELECT {condition} FROM t_resource_schedule"));
    sqlx::query_scalar::<_, bool>(row).fetch_one(conn).await.unwrap()
}

/// What begins afresh leaves a run alone until the history has it, whatever the clock says.
#[tokio::test]
async fn a_run_is_cleared_once_it_is_recorded() {
    let mut conn = due().await;
    let claim = claim_of(&mut conn).await;
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
async fn a_claim_whose_row_has_another_slot_is_not_put_back() {
    let (mut conn, claim) = claimed_under_other_times().await;
    assert!(!Sqlite::put_back(&mut conn, claim.holder, Holder::unique(), &[times().name]).await.unwrap());
    assert!(Sqlite::hand_back(&mut conn, &claim, Holder::unique()).await.unwrap());
    assert!(has(&mut conn, "slot = 60000000 AND run_slot = 0 AND attempt = 1 AND spec = 'every 2m'").await);
}

/// It stands for the ticks before it.
#[tokio::test]
async fn a_claim_whose_slot_was_moved_is_not_put_back() {
    let mut conn = due().await;
    let (claim, to) = (claim_of(&mut conn).await, SLOT + TimeDelta::minutes(5));
    let pass = Pass { times: &times(), from: SLOT, to, runs: true, missed: 5, skipped: 0, error: None };
    assert!(Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
    assert!(!Sqlite::put_back(&mut conn, claim.holder, Holder::unique(), &[times().name]).await.unwrap());
    assert!(has(&mut conn, "slot = 300000000 AND run_slot = slot AND attempt = 1 AND missed = 5").await);
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
            let claimed = claims(&mut conn, &ask, &seen).await;
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

/// Claims what is due.
pub(super) async fn claim_of(conn: &mut SqliteConnection) -> Claim {
    claim_due(conn, None).await.unwrap().claimed.remove(0).claim
}

async fn order(conn: &mut SqliteConnection, what: What, until: DateTime<Utc>) {
    Sqlite::order(conn, &Order { what, name: "report", since: until, until, who: "alice" }).await.unwrap();
}

/// Another pause may have begun since the end of the first one was read.
#[tokio::test]
async fn an_order_that_ends_later_than_was_read_is_not_cancelled() {
    let mut conn = due().await;
    let later = SLOT + TimeDelta::minutes(1);
    for (by, is_cancelled) in [(Some(SLOT), false), (Some(later), true), (None, true)] {
        order(&mut conn, What::Pause, later).await;
        assert_eq!(Sqlite::cancel(&mut conn, What::Pause, "report", by).await.unwrap(), is_cancelled, "{by:?}");
        let left = Sqlite::ordered(&mut conn, What::Pause, "report").await.unwrap();
        assert_eq!(left.is_none(), is_cancelled, "{by:?}");
    }
}

/// The order comes between the claim and the move. One for another tick changes nothing.
#[tokio::test]
async fn a_tick_that_was_stopped_after_its_claim_is_not_moved() {
    let to = SLOT + TimeDelta::minutes(5);
    for runs in [true, false] {
        let mut conn = due().await;
        let claim = claim_of(&mut conn).await;
        let pass = Pass { times: &times(), from: SLOT, to, runs, missed: 5, skipped: 5, error: None };
        order(&mut conn, What::Stop, SLOT).await;
        assert!(!Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
        assert!(has(&mut conn, "slot = 0 AND run_slot = 0 AND attempt = 1 AND holder IS NOT NULL").await);
        assert!(has(&mut conn, "NOT EXISTS (SELECT 1 FROM t_resource_schedule_run)").await);
        order(&mut conn, What::Stop, to).await;
        assert!(Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
        assert!(has(&mut conn, "slot = 300000000 AND EXISTS (SELECT 1 FROM t_resource_schedule_run)").await);
    }
}

/// The order is taken back between the claim and the move. One for other ticks is no order for this
/// one.
#[tokio::test]
async fn a_tick_whose_order_to_skip_was_taken_back_is_not_moved() {
    let to = SLOT + TimeDelta::minutes(5);
    for runs in [true, false] {
        let mut conn = due().await;
        let claim = claim_of(&mut conn).await;
        let error = Some("skipped by alice");
        let pass = Pass { times: &times(), from: SLOT, to, runs, missed: 0, skipped: 1, error };
        assert!(!Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
        for other in [-1, 1] {
            order(&mut conn, What::Skip, SLOT + TimeDelta::minutes(other)).await;
            assert!(!Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
        }
        assert!(has(&mut conn, "slot = 0 AND run_slot = 0 AND attempt = 1 AND holder IS NOT NULL").await);
        order(&mut conn, What::Skip, SLOT).await;
        assert!(Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
        assert!(has(&mut conn, "slot = 300000000 AND EXISTS (SELECT 1 FROM t_resource_schedule_run)").await);
    }
}

#[tokio::test]
async fn a_trigger_after_a_claim_whose_tick_is_skipped_is_due() {
    let mut conn = due().await;
    let claim = claim_of(&mut conn).await;
    assert!(Sqlite::trigger(&mut conn, &claim.key).await.unwrap());
    // Far ahead.
    let to = SLOT + TimeDelta::days(100_000);
    let pass = Pass { times: &times(), from: SLOT, to, runs: false, missed: 0, skipped: 1, error: None };
    assert!(Sqlite::skip_ticks(&mut conn, &claim, &pass).await.unwrap());
    assert!(has(&mut conn, "triggered_at IS NOT NULL AND holder IS NULL AND attempt = 0 AND due_at < slot").await);
    let next = claim_of(&mut conn).await;
    assert!(next.token > claim.token, "it is claimed");
}

/// Claims a row as it was seen.
async fn claims(conn: &mut SqliteConnection, ask: &DueRequest<'_>, seen: &Seen) -> bool {
    match seen.running {
        true => Sqlite::take_over(conn, ask, seen).await.unwrap(),
        false => Sqlite::take_free(conn, ask, &[seen], ask.known[0].lease).await.unwrap() == [true],
    }
}

/// A free row, and one whose run was lost. The claim would not obey the order.
#[tokio::test]
async fn a_look_from_before_an_order_leads_to_no_claim() {
    for (takes_over, attempt) in [(false, 0), (true, 1)] {
        let mut conn = due().await;
        if takes_over {
            claim_of(&mut conn).await;
            execute(&mut conn, "UPDATE t_resource_schedule SET due_at = 0").await;
        }
        let known = [known()];
        let ask = DueRequest { known: &known, holder: Holder::unique(), label: "a", most: 1, not_after: None };
        let before = Sqlite::look_for_due(&mut conn, &ask).await.unwrap().remove(0);
        let run_slot = takes_over.then_some(SLOT);
        let seen = ListedSchedule { attempt, run_slot, ..ListedSchedule::unrun(times(), SLOT) };
        // The run of a trigger has ended since, and another one was begun.
        let earlier = ListedSchedule { run_slot: Some(SLOT - TimeDelta::microseconds(1)), ..seen.clone() };
        assert!(!Sqlite::latch(&mut conn, &earlier).await.unwrap());
        assert!(Sqlite::latch(&mut conn, &seen).await.unwrap());
        let after = Sqlite::look_for_due(&mut conn, &ask).await.unwrap().remove(0);
        assert!(!claims(&mut conn, &ask, &before).await, "takes over: {takes_over}");
        assert!(claims(&mut conn, &ask, &after).await, "takes over: {takes_over}");
    }
}

/// A change of times after each change that another statement may make after the row was read.
#[tokio::test]
async fn a_row_that_has_changed_since_it_was_read_keeps_its_times() {
    let changes = [
        ("", true),
        ("due_at = due_at + 1", true),
        ("paused = 1", true),
        ("token = token + 1", true),
        ("missed = 1", true),
        ("spec = 'every 2m'", false),
        ("zone = 'Asia/Tokyo'", false),
        ("run_slot = slot", false),
        ("attempt = attempt + 1", false),
        ("slot = slot + 1", false),
    ];
    for (change, is_made) in changes {
        for within in [false, true] {
            let mut conn = due().await;
            let seen = Some(Box::new(ListedSchedule::unrun(times(), SLOT)));
            if !change.is_empty() {
                execute(&mut conn, &format!("UPDATE t_resource_schedule SET {change}")).await;
            }
            let other = Times { spec: "every 3m".into(), ..times() };
            let creation = TimesChange::creation(other, SLOT + TimeDelta::minutes(3));
            let wanted = TimesChange { seen, known: "new".into(), ..creation };
            let made = if within {
                Sqlite::change_within(&mut conn, &wanted).await
            } else {
                Sqlite::change_times(&mut conn, &wanted).await
            };
            assert_eq!(made.unwrap(), is_made, "{change}, within a transaction: {within}");
            assert_eq!(has(&mut conn, "spec = 'every 3m' AND slot = 180000000").await, is_made, "{change}");
            let known = sqlx::query_scalar::<_, String>("SELECT known FROM t_resource_schedule_times");
            assert_eq!(known.fetch_one(&mut conn).await.unwrap() == "new", is_made, "{change}");
        }
    }
}

/// A claim may be undone twice, and another instance may have the row by then.
#[tokio::test]
async fn a_claim_that_is_put_back_twice_leaves_the_next_one_alone() {
    let mut conn = due().await;
    let first = claim_of(&mut conn).await;
    let names = [times().name];
    assert!(Sqlite::put_back(&mut conn, first.holder, Holder::unique(), &names).await.unwrap());
    assert!(has(&mut conn, "holder IS NULL AND attempt = 0 AND due_at = 0").await);
    let next = claim_of(&mut conn).await;
    assert!(!Sqlite::put_back(&mut conn, first.holder, Holder::unique(), &names).await.unwrap());
    let holder = next.holder.as_uuid().simple();
    assert!(has(&mut conn, &format!("holder = x'{holder}' AND attempt = 1 AND due_at > 0")).await);
}

/// The claim of a triggered run has the time of the trigger.
#[tokio::test]
async fn a_triggered_claim_that_is_put_back_leaves_the_slot_alone() {
    let mut conn = due().await;
    let later = "UPDATE t_resource_schedule SET slot = 4000000000000000, due_at = 4000000000000000";
    execute(&mut conn, later).await;
    assert!(Sqlite::trigger(&mut conn, &times().name).await.unwrap());
    let claim = claim_of(&mut conn).await;
    assert!(has(&mut conn, "run_slot = triggered_at AND run_slot < slot").await);
    Sqlite::put_back(&mut conn, claim.holder, Holder::unique(), &[times().name]).await.unwrap();
    assert!(has(&mut conn, "slot = 4000000000000000 AND attempt = 0 AND holder IS NULL").await);
    assert!(has(&mut conn, "due_at >= triggered_at - 1 AND due_at < slot AND triggered_at = run_slot").await);
}

/// The run before it failed, or was lost.
#[tokio::test]
async fn an_attempt_that_is_put_back_is_a_takeover_if_the_last_one_was_lost() {
    for (statuses, shown) in [("F", None), ("L", Some("first")), ("FL", Some("second")), ("LL", Some("second"))] {
        let mut conn = due().await;
        let attempts = statuses.len();
        let failed = format!("UPDATE t_resource_schedule SET attempt = {attempts}, run_slot = slot, begin_time = 9");
        execute(&mut conn, &failed).await;
        // Those of another tick do not count.
        for (attempt, status) in (1..).zip(statuses.chars()) {
            for (slot, status, label) in [(-60_000_000, 'L', "other"), (0, status, ["first", "second"][attempt - 1])] {
                let run = format!(
                    "INSERT INTO t_resource_schedule_run
                         (name, slot, attempt, token, client_ip, begin_time, end_time, status)
                     VALUES ('report', {slot}, {attempt}, 1, '{label}', {attempt}, 1, '{status}')"
                );
                execute(&mut conn, &run).await;
            }
        }
        let claim = claim_of(&mut conn).await;
        assert!(Sqlite::put_back(&mut conn, claim.holder, Holder::unique(), &[times().name]).await.unwrap());
        let row = Sqlite::registered(&mut conn, &[times().name]).await.unwrap().remove(0);
        assert_eq!((row.attempt as usize, row.running), (attempts, shown.is_some()), "{statuses}: {row:?}");
        assert_eq!(row.label, shown.unwrap_or("test"), "{statuses}");
    }
}

/// A run that was lost has the token of its claim in the history too.
#[tokio::test]
async fn a_run_that_was_handed_back_has_not_succeeded() {
    let mut conn = due().await;
    let claim = claim_of(&mut conn).await;
    assert!(Sqlite::hand_back(&mut conn, &claim, Holder::unique()).await.unwrap());
    for (status, is_it) in [("S", false), ("F", false), ("L", true)] {
        assert_eq!(Sqlite::has_ended(&mut conn, &claim, SLOT, 1, status).await.unwrap(), is_it, "{status}");
    }
}

/// The first time counts, however often a schedule is seen to be gone.
#[tokio::test]
async fn a_schedule_that_is_marked_as_gone_again_is_gone_since_the_first_time() {
    let mut conn = due().await;
    let gone_at =
        async |conn: &mut SqliteConnection| Sqlite::registered(conn, &[times().name]).await.unwrap().remove(0).gone_at;
    assert_eq!(gone_at(&mut conn).await, None);
    Sqlite::mark_gone(&mut conn, &[times().name]).await.unwrap();
    assert!(gone_at(&mut conn).await.is_some());
    execute(&mut conn, "UPDATE t_resource_schedule_times SET gone_at = 5").await;
    Sqlite::mark_gone(&mut conn, &[times().name]).await.unwrap();
    assert_eq!(gone_at(&mut conn).await, Some(SLOT + TimeDelta::microseconds(5)));
}

/// An operator has paused the heir without an end since both rows were read.
#[tokio::test]
async fn a_rename_gives_no_end_to_a_pause_that_has_none() {
    let mut conn = due().await;
    let heir = Times { name: Key::new("heir").unwrap(), ..times() };
    assert!(Sqlite::change_times(&mut conn, &TimesChange::creation(heir.clone(), SLOT)).await.unwrap());
    let change = |times: Times| {
        let seen = Some(Box::new(ListedSchedule::unrun(times.clone(), SLOT)));
        TimesChange { seen, ..TimesChange::creation(times, SLOT) }
    };
    let changes = [change(times()), change(heir.clone())];
    order(&mut conn, What::Pause, SLOT + TimeDelta::minutes(1)).await;
    for name in [&times().name, &heir.name] {
        assert!(Sqlite::pause(&mut conn, name, true).await.unwrap());
    }
    assert!(Sqlite::rename(&mut conn, &changes[0], &changes[1]).await.unwrap());
    let row = Sqlite::registered(&mut conn, &[heir.name]).await.unwrap().remove(0);
    assert!(row.paused && row.paused_until.is_none(), "{row:?}");
}
