//! Claims of rows, and their creation.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    key::Key,
    rules::{Terms, Verdict, judge},
    store::{
        ClaimReply, ClaimRequest, ClaimStore, Form, Reply, limit_micros,
        sqlite::{
            free, judged,
            row::{kept, keys, sql},
        },
    },
};

const CREATE: &str = sql!("
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT CAST(unhex(value) AS TEXT), 'S', 0, " {kept!("begin_time", "0")} ", '', ?2, 0, 0 FROM json_each(?1) WHERE true
ON CONFLICT (key_resource) DO NOTHING");

impl ClaimStore for Sqlite {
    async fn create(conn: &mut SqliteConnection, new: &[Key], minutes: i32, _: Duration, _: Form) -> Reply<()> {
        sqlx::query(CREATE).bind(keys(new)).bind(minutes).execute(conn).await.map(drop)
    }

    /// Claims the rows that the rules grant, for a single holder all of them or none. `limit` is
    /// the time, in microseconds, after which none is granted. `in_micros`: the table keeps times
    /// as integers, and the file is in WAL mode.
    async fn claim(
        conn: &mut SqliteConnection,
        requests: &[ClaimRequest],
        terms: &Terms,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> Reply<Vec<ClaimReply>> {
        let (limit, in_micros) = (limit_micros(not_after), form == Form::IntegerTimes);
        let replies = match in_micros && free::is_likely(requests, terms) {
            true => free::claim(conn, requests, terms, limit).await?,
            false => None,
        };
        // The rules may grant a row that is locked: its lease has ended, or it is this holder's.
        // Beside claims that were granted, and are committed, such a request is left to a statement
        // of its own.
        let is_grantable = |(request, reply): (&ClaimRequest, &ClaimReply)| match reply {
            ClaimReply::Seen { row: Some(row), now } => {
                !matches!(judge(Some(row), *now, request.holder, terms), Verdict::Refuse(..))
            }
            _ => false,
        };
        let is_granted = |reply: &ClaimReply| matches!(reply, ClaimReply::Granted { .. });
        let is_enough = |replies: &Vec<ClaimReply>| {
            replies.iter().any(is_granted) || !requests.iter().zip(replies).any(is_grantable)
        };
        match replies.filter(is_enough) {
            Some(replies) => Ok(replies),
            None => judged::claim(conn, requests, terms, limit, in_micros).await,
        }
    }

    async fn look(conn: &mut SqliteConnection, requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
        judged::look(conn, requests, terms).await
    }
}
