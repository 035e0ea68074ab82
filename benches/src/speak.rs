//! The calls of the hand-written contenders: sqlx's queries are typed by database, so each database
//! has its own implementation of a few calls.

use std::future::Future;

use sqlx::{AssertSqlSafe, MySql, Pool, Postgres, Row as _, Sqlite};
use uuid::Uuid;

use crate::{database::Bench, error::Error};

#[derive(Clone, Copy)]
pub enum Bind<'a> {
    Text(&'a str),
    Number(i64),
    Id(Uuid),
}

type Reply<T> = sqlx::Result<T>;

/// All statements are prepared, once per connection. The texts are in [`crate::dialect`].
pub trait Speak: Bench + crate::dialect::Dialect {
    /// Returns how many rows the statement changed.
    fn execute(
        conn: &mut Self::Connection,
        sql: &'static str,
        binds: &[Bind<'_>],
    ) -> impl Future<Output = Reply<u64>> + Send;

    fn row(
        conn: &mut Self::Connection,
        sql: &'static str,
        binds: &[Bind<'_>],
    ) -> impl Future<Output = Reply<Option<Self::Row>>> + Send;

    /// An integer column of any width.
    fn number(row: &Self::Row, column: usize) -> Reply<i64>;

    fn text(row: &Self::Row, column: usize) -> Reply<String>;

    /// Statements without parameters, one after the other.
    fn script(pool: &Pool<Self>, sql: String) -> impl Future<Output = Reply<()>> + Send;

    /// The token that a change returns, if it changed a row.
    fn token(
        conn: &mut Self::Connection,
        sql: &'static str,
        binds: &[Bind<'_>],
    ) -> impl Future<Output = Reply<Option<i64>>> + Send {
        async move { Self::row(conn, sql, binds).await?.map(|row| Self::number(&row, 0)).transpose() }
    }
}

/// Inserts the rows, each as SQL text, a thousand in one statement.
pub async fn fill<DB: Speak>(pool: &Pool<DB>, into: &str, rows: impl Iterator<Item = String>) -> Result<(), Error> {
    let mut rows = rows.peekable();
    while rows.peek().is_some() {
        let values: Vec<String> = rows.by_ref().take(1000).collect();
        DB::script(pool, format!("INSERT INTO {into} VALUES {}", values.join(", "))).await?;
    }
    Ok(())
}

macro_rules! speak {
    ($database:ident, { $($own:item)* }) => {
        impl Speak for $database {
            async fn execute(conn: &mut Self::Connection, sql: &'static str, binds: &[Bind<'_>]) -> Reply<u64> {
                Ok(bound!($database, sql, binds).execute(conn).await?.rows_affected())
            }

            async fn row(conn: &mut Self::Connection, sql: &'static str, binds: &[Bind<'_>]) -> Reply<Option<Self::Row>> {
                bound!($database, sql, binds).fetch_optional(conn).await
            }

            fn number(row: &Self::Row, column: usize) -> Reply<i64> {
                row.try_get_unchecked(column)
            }

            fn text(row: &Self::Row, column: usize) -> Reply<String> {
                row.try_get_unchecked(column)
            }

            async fn script(pool: &Pool<Self>, sql: String) -> Reply<()> {
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop)
            }

            $($own)*
        }
    };
}

macro_rules! bound {
    ($database:ident, $sql:expr, $binds:expr) => {
        $binds.iter().fold(sqlx::query::<$database>($sql), |query, bind| match *bind {
            Bind::Text(text) => query.bind(text),
            Bind::Number(number) => query.bind(number),
            Bind::Id(id) => query.bind(id),
        })
    };
}

speak!(Sqlite, {});
speak!(Postgres, {});
speak!(MySql, {
    /// A change returns no columns, only the last insert id.
    async fn token(conn: &mut Self::Connection, sql: &'static str, binds: &[Bind<'_>]) -> Reply<Option<i64>> {
        let reply = bound!(MySql, sql, binds).execute(conn).await?;
        Ok(i64::try_from(reply.last_insert_id()).ok().filter(|_| reply.rows_affected() > 0))
    }
});
