//! Renewals, releases, abandonments and confirmations: changes of claims that stand.

use std::sync::LazyLock;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres, Row as _};
use uuid::Uuid;

use crate::{
    key::Claim,
    store::{
        Change, Confirmed, Form, HeldStore, Outcome, Reply,
        postgres::row::{FEW, bind_claim, finite, in_time, snapshot_of},
        unconfirmed, unmatched,
    },
};

const ONE_CLAIM: &str =
    "NOT MATERIALIZED (SELECT $1::text AS key, $2::uuid AS holder, $3::bigint AS token, 1 AS place)";
const MANY_CLAIMS: &str =
    "(SELECT * FROM unnest($1::text[], $2::uuid[], $3::bigint[]) WITH ORDINALITY AS r (key, holder, token, place))";

/// One value instead of several conditions: the planner would assume that each is rarely true, and
/// scan `done` once for every claim.
const OURS: &str = "
CASE WHEN t.lock_flag = 1 AND t.holder = r.holder AND t.token = r.token AND t.claimed_at = t.begin_time AND t.end_time IS NULL THEN 1 END IS NOT NULL";

/// Notifies waiters that the row is free. NOTIFY takes a server-wide lock at commit, so it is sent
/// only if a task waits. With a full queue the commit would fail, and waiters ask by themselves.
macro_rules! notified {
    ($row:literal) => {
        concat!(
            "CASE WHEN ",
            $row,
            ".awaited IS TRUE AND (SELECT pg_notification_queue_usage() < 0.9) THEN pg_notify('rowlock', ",
            $row,
            ".key_resource) END IS NULL AS notified"
        )
    };
}
pub(super) use notified;

const NOTIFIED: &str = concat!(", ", notified!("d"));

/// Of a row that was not changed.
const SEEN: &str = concat!(
    "true AS seen, holder, token, lock_flag = 1 AS locked, end_time IS NOT NULL AS ended, ",
    finite!("begin_time"),
    " AS begin_time, ",
    finite!("claimed_at"),
    " AS claimed_at, ",
    finite!("expires_at"),
    " AS expires_at"
);

/// The statements of one kind of change, for one claim and for many.
struct ChangeStatement {
    one: String,
    many: String,
}

impl ChangeStatement {
    fn new(set: &str, limit: &str, notified: &str) -> Self {
        let statement = |asked| change_statement(asked, set, limit, notified);
        Self { one: statement(ONE_CLAIM), many: statement(MANY_CLAIMS) }
    }
}

fn change_statement(asked: &str, set: &str, limit: &str, notified: &str) -> String {
    format!(
        "
WITH asked AS {asked},
done AS (
    UPDATE t_resource_lock t SET {set}
    FROM (SELECT t.key_resource, r.place FROM {FEW} r JOIN t_resource_lock t ON t.key_resource = r.key WHERE {OURS} FOR UPDATE OF t SKIP LOCKED) l
    WHERE t.key_resource = l.key_resource{limit} RETURNING l.place, t.key_resource, t.confirms, t.awaited
)
SELECT d.place IS NOT NULL AS done, d.confirms, s.*, current_setting('transaction_isolation') <> 'read committed' AS snapshot{notified}
FROM asked r LEFT JOIN done d ON d.place = r.place LEFT JOIN LATERAL (
    SELECT {SEEN}, clock_timestamp() AS now FROM t_resource_lock t WHERE t.key_resource = r.key AND d.place IS NULL) s ON true
ORDER BY r.place"
    )
}

static RENEW: LazyLock<ChangeStatement> = LazyLock::new(|| {
    let set = "expires_at = greatest(t.expires_at, clock_timestamp() + $4::interval)";
    ChangeStatement::new(set, concat!(" AND ", in_time!("$5")), "")
});
static RELEASE: LazyLock<ChangeStatement> = LazyLock::new(|| {
    ChangeStatement::new(
        "lock_flag = 0, status = $4, end_time = clock_timestamp() + $5::interval, holder = NULL, expires_at = NULL,
        claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL",
        "",
        &format!("{NOTIFIED}, {}", asynchronous_commit("$6")),
    )
});
static ABANDON: LazyLock<ChangeStatement> = LazyLock::new(|| {
    let notified = format!("{NOTIFIED}, {}", asynchronous_commit("true"));
    ChangeStatement::new("expires_at = least(t.expires_at, clock_timestamp() + $4::interval)", "", &notified)
});

static PUT_BACK: LazyLock<ChangeStatement> = LazyLock::new(|| {
    ChangeStatement::new(
        "status = t.prior_status, begin_time = t.prior_begin_time, end_time = t.prior_end_time, client_ip = t.prior_client_ip,
        lock_flag = CASE WHEN t.prior_token IS NULL THEN 0 ELSE 1 END, prior_client_ip = NULL,
        holder = CASE WHEN t.prior_token IS NOT NULL THEN '00000000-0000-0000-0000-000000000000'::uuid END,
        expires_at = CASE WHEN t.prior_token IS NOT NULL THEN clock_timestamp() END,
        claimed_at = CASE WHEN t.prior_token IS NOT NULL THEN t.prior_begin_time END",
        "",
        NOTIFIED,
    )
});

/// Commits asynchronously. If the server crashes at that moment, the claim may stand again, without
/// a renewer, and end with its lease. The next claim's commit makes both durable.
fn asynchronous_commit(when: &str) -> String {
    format!("CASE WHEN {when} THEN set_config('synchronous_commit', 'off', true) END IS NULL AS strict")
}

static CONFIRM: LazyLock<String> = LazyLock::new(|| change_statement(ONE_CLAIM, "confirms = t.confirms + 1", "", ""));

/// The lock waits for a transaction whose COMMIT was not answered. The condition is then evaluated
/// again.
static CONFIRMS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
SELECT t.confirms FROM t_resource_lock t, (SELECT $2::uuid AS holder, $3::bigint AS token) r
WHERE t.key_resource = $1 AND {OURS} FOR UPDATE OF t"
    )
});

impl HeldStore for Postgres {
    async fn confirm(conn: &mut PgConnection, claim: &Claim) -> Reply<Confirmed> {
        let row = bind_claim(CONFIRM.as_str(), claim).fetch_one(conn).await?;
        Ok(match row.try_get("confirms")? {
            Some(count) => Confirmed::Done(count),
            None => match snapshot_of(&row)? {
                // The transaction's own snapshot may be older than the row.
                None if row.try_get("snapshot")? => Confirmed::TooOld,
                seen => unconfirmed(claim, seen),
            },
        })
    }

    async fn confirms(conn: &mut PgConnection, claim: &Claim) -> Reply<Option<i64>> {
        let row = bind_claim(CONFIRMS.as_str(), claim).fetch_optional(conn).await?;
        row.map(|row| row.try_get(0)).transpose()
    }

    async fn change(
        conn: &mut PgConnection,
        claims: &[Claim],
        change: Change,
        not_after: Option<DateTime<Utc>>,
        _: Form,
    ) -> Reply<Vec<Outcome>> {
        let ChangeStatement { one, many }: &'static ChangeStatement = match change {
            Change::Renew(_) => &RENEW,
            Change::Release { .. } => &RELEASE,
            Change::Abandon(_) => &ABANDON,
            Change::PutBack => &PUT_BACK,
        };
        let query = match claims {
            [claim] => bind_claim(one.as_str(), claim),
            _ => {
                let keys: Vec<&str> = claims.iter().map(|claim| claim.key.as_str()).collect();
                let holders: Vec<Uuid> = claims.iter().map(|claim| *claim.holder.as_uuid()).collect();
                let tokens: Vec<i64> = claims.iter().map(|claim| claim.token.get()).collect();
                sqlx::query(many.as_str()).bind(keys).bind(holders).bind(tokens)
            }
        };
        let query = match change {
            Change::Renew(lease) => query.bind(lease).bind(not_after),
            Change::Abandon(delay) => query.bind(delay),
            Change::Release { status, offset, asynchronous } => {
                query.bind(status.letter()).bind(offset).bind(asynchronous)
            }
            Change::PutBack => query,
        };
        let rows = query.fetch_all(conn).await?;
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                if row.try_get("done")? {
                    return Ok(Outcome::Done);
                }
                Ok(unmatched(change, claim, snapshot_of(row)?, not_after))
            })
            .collect()
    }
}
