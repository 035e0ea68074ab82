//! Locks of the server that belong to a connection, which is kept as long as the key is held.

use sqlx::{Pool, pool::PoolConnection};

use super::{Ask, Lock};
use crate::{
    error::Error,
    speak::{Bind::Text, Speak},
};

pub struct Advisory<DB: Speak> {
    pool: Pool<DB>,
    take: &'static str,
    free: &'static str,
}

impl<DB: Speak> Advisory<DB> {
    /// `None` on a database that has no such locks.
    pub fn new(pool: Pool<DB>) -> Option<Self> {
        DB::ADVISORY.map(|(take, free)| Self { pool, take, free })
    }
}

impl<DB: Speak> Lock for Advisory<DB> {
    type Held = PoolConnection<DB>;

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<PoolConnection<DB>>, Error> {
        let mut conn = self.pool.acquire().await?;
        let taken = one::<DB>(&mut conn, self.take, ask.key).await?;
        Ok(taken.then_some(conn))
    }

    async fn release(&self, ask: &Ask<'_>, mut conn: PoolConnection<DB>) -> Result<(), Error> {
        if one::<DB>(&mut conn, self.free, ask.key).await? { Ok(()) } else { Err("it was not held".into()) }
    }
}

async fn one<DB: Speak>(conn: &mut DB::Connection, sql: &'static str, key: &str) -> Result<bool, Error> {
    let row = DB::row(conn, sql, &[Text(key)]).await?.ok_or("no answer")?;
    Ok(DB::number(&row, 0)? == 1)
}
