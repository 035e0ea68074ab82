//! The functions in SQL, as a program without the crate calls them.

use sqlx::Pool;

use super::{Ask, CLIENT, Lock};
use crate::{
    error::Error,
    speak::{
        Bind::{Number, Text},
        Speak,
    },
};

pub struct Functions<DB: Speak> {
    pool: Pool<DB>,
    take: &'static str,
    free: &'static str,
}

impl<DB: Speak> Functions<DB> {
    pub fn new(pool: Pool<DB>, (take, free): (&'static str, &'static str)) -> Self {
        Self { pool, take, free }
    }
}

impl<DB: Speak> Lock for Functions<DB> {
    /// The holder and the token.
    type Held = (String, i64);

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<(String, i64)>, Error> {
        let mut conn = self.pool.acquire().await?;
        let row = DB::row(&mut conn, self.take, &[Text(ask.key), Text(CLIENT)]).await?.ok_or("no answer")?;
        if DB::number(&row, 0)? != 1 {
            return Ok(None);
        }
        Ok(Some((DB::text(&row, 2)?, DB::number(&row, 1)?)))
    }

    async fn release(&self, ask: &Ask<'_>, (holder, token): (String, i64)) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let binds = [Text(ask.key), Text(&holder), Number(token)];
        let row = DB::row(&mut conn, self.free, &binds).await?.ok_or("no answer")?;
        match DB::text(&row, 0)?.as_str() {
            "done" => Ok(()),
            outcome => Err(format!("the release was {outcome}").into()),
        }
    }
}
