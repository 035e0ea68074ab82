//! Code that is compiled with the library, and not once more with each program that uses it.
//!
//! The locks are generic over the database, and a compiler compiles generic code where it is first
//! used for a type. That is here, for each database. Without optimization, a program shares what a
//! library has compiled, so that its own build takes a fraction of the time. With optimization it
//! compiles its own, so this file is left out where `debug_assertions` are off.

use std::{pin::Pin, time::Duration};

use sqlx::Pool;

use crate::{error::Error, lease::lock::LeaseLock, migration::migrate, store::Database};

/// A call that is compiled, and never made.
type Call<DB> = fn(Pool<DB>) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

#[used]
#[cfg(feature = "sqlite")]
static SQLITE: Call<sqlx::Sqlite> = |pool| Box::pin(calls(pool));
#[used]
#[cfg(feature = "postgres")]
static POSTGRES: Call<sqlx::Postgres> = |pool| Box::pin(calls(pool));
#[used]
#[cfg(feature = "mysql")]
static MYSQL: Call<sqlx::MySql> = |pool| Box::pin(calls(pool));

/// The calls that most programs make. They lead to nearly all code that is generic over the
/// database alone.
async fn calls<DB: Database>(pool: Pool<DB>) -> Result<(), Error> {
    migrate(&pool).await?;
    #[cfg(feature = "schedule")]
    drop(crate::schedule::schedules::Schedules::new(pool.clone()).start().await?);
    let lock = LeaseLock::new(pool);
    drop(lock.try_acquire("").await?);
    lock.acquire("", Duration::ZERO).await?.release().await?;
    lock.shutdown(Duration::ZERO).await;
    Ok(())
}
