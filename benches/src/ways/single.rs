//! The minimum that is correct, by hand: one statement that locks the row unless it is held, one
//! that frees it.

use sqlx::Pool;
use uuid::Uuid;

use super::{Ask, CLIENT, Lock};
use crate::{
    error::Error,
    speak::{
        Bind::{Id, Number, Text},
        Speak,
    },
};

pub struct Single<DB: Speak>(pub Pool<DB>);

impl<DB: Speak> Lock for Single<DB> {
    type Held = (Uuid, i64);

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<(Uuid, i64)>, Error> {
        let holder = Uuid::new_v4();
        let mut conn = self.0.acquire().await?;
        let token = DB::token(&mut conn, DB::SINGLE_TAKE, &[Text(CLIENT), Id(holder), Text(ask.key)]).await?;
        Ok(token.map(|token| (holder, token)))
    }

    async fn release(&self, ask: &Ask<'_>, (holder, token): (Uuid, i64)) -> Result<(), Error> {
        let mut conn = self.0.acquire().await?;
        match DB::execute(&mut conn, DB::SINGLE_FREE, &[Text(ask.key), Id(holder), Number(token)]).await? {
            1 => Ok(()),
            rows => Err(format!("the release changed {rows} rows").into()),
        }
    }
}
