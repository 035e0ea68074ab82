//! The article's way by hand: a transaction that locks the row, judges it in the client and marks
//! it; later a change that frees it.

use sqlx::Pool;

use super::{Ask, CLIENT, Lock};
use crate::{
    error::Error,
    speak::{Bind::Text, Speak},
};

pub struct Article<DB: Speak>(pub Pool<DB>);

impl<DB: Speak> Lock for Article<DB> {
    type Held = ();

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<()>, Error> {
        let mut tx = self.0.begin_with(DB::BEGIN).await?;
        let row = DB::row(&mut tx, DB::ARTICLE_LOOK, &[Text(ask.key)]).await?.ok_or("the row is missing")?;
        // There is no minimum interval here: a free row is taken at once.
        if DB::text(&row, 0)? != "S" || DB::number(&row, 1)? != 0 {
            tx.rollback().await?;
            return Ok(None);
        }
        DB::execute(&mut tx, DB::ARTICLE_TAKE, &[Text(CLIENT), Text(ask.key)]).await?;
        tx.commit().await?;
        Ok(Some(()))
    }

    async fn release(&self, ask: &Ask<'_>, (): ()) -> Result<(), Error> {
        let mut conn = self.0.acquire().await?;
        match DB::execute(&mut conn, DB::ARTICLE_FREE, &[Text(ask.key)]).await? {
            1 => Ok(()),
            rows => Err(format!("the article's release changed {rows} rows").into()),
        }
    }
}
