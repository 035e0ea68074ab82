//! An application on sqlx 0.8 (diesel, rusqlite or tokio-postgres are the same): rowlock opens
//! connections of its own. The commit of the application's own transaction depends on the lease,
//! by the function `rowlock_confirm` in the database.
//!
//!     export DATABASE_URL=postgres://app@localhost/app
//!     cargo run -p rowlock-example-ecosystem --example sqlx_0_8

#![allow(clippy::print_stdout)]

use std::{error::Error, time::Duration};

use rowlock::{Claim, LeaseLock, sqlx::Postgres};
use sqlx_0_8::{PgPool, query};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Writes in a transaction of the application, which fails unless the claim stands.
async fn write(pool: &PgPool, claim: &Claim) -> std::result::Result<(), sqlx_0_8::Error> {
    let mut tx = pool.begin().await?;
    let confirm = query("SELECT rowlock_confirm($1, $2, $3)");
    let confirm = confirm.bind(claim.key.as_str()).bind(claim.holder.as_uuid()).bind(claim.token.get());
    confirm.execute(&mut *tx).await?;
    query("INSERT INTO report VALUES ($1)").bind(claim.token.get()).execute(&mut *tx).await?;
    tx.commit().await
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = PgPool::connect(&url).await?;
    let lock = LeaseLock::<Postgres>::connect(&url).await?;
    rowlock::migrate(lock.pool()).await?;
    rowlock::migration::migrate_functions(lock.pool()).await?;
    query("CREATE TABLE IF NOT EXISTS report (token bigint)").execute(&pool).await?;

    let lease = lock.acquire("report", Duration::from_secs(60)).await?;
    let claim = lease.claim().clone();
    write(&pool, &claim).await?;
    println!("wrote under token {}", claim.token);
    lease.release().await?;
    match write(&pool, &claim).await {
        Ok(()) => Err("a claim that was released has been confirmed".into()),
        Err(error) => {
            println!("refused after the release: {error}");
            Ok(())
        }
    }
}
