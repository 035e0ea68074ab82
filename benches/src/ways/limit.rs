//! The limit of the server itself: durable changes of one row each, two of which are a cycle.

use std::sync::Arc;

use sqlx::Pool;

use crate::{
    contest::{Contender, Cycling},
    error::Error,
    speak::{Bind::Number, Speak, fill},
};

/// Creates the rows that are changed, one for each task.
pub async fn prepare<DB: Speak>(pool: &Pool<DB>, tasks: usize) -> Result<(), Error> {
    DB::script(pool, "DROP TABLE IF EXISTS plain".into()).await?;
    DB::script(pool, "CREATE TABLE plain (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL)".into()).await?;
    fill(pool, "plain (id, n)", (0..tasks).map(|id| format!("({id}, 0)"))).await
}

/// The simplest statements.
pub fn limit<DB: Speak>(pool: Pool<DB>) -> Arc<dyn Contender> {
    Arc::new(Plain(pool))
}

struct Plain<DB: Speak>(Pool<DB>);

impl<DB: Speak> Contender for Plain<DB> {
    fn cycle(&self, task: usize) -> Cycling<'_> {
        Box::pin(async move {
            let id = [Number(i64::try_from(task)?)];
            for _ in 0..2 {
                let mut conn = self.0.acquire().await?;
                DB::execute(&mut conn, DB::PLAIN, &id).await?;
            }
            Ok(1)
        })
    }
}
