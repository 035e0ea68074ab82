//! An application on sea-orm (loco too): rowlock takes the pool that sea-orm has opened. The work
//! writes with sea-orm, and its table refuses the token of an earlier holder.
//!
//!     export DATABASE_URL=postgres://app@localhost/app
//!     cargo run -p rowlock-example-ecosystem --example sea_orm_pool

#![allow(clippy::print_stdout)]

use std::{error::Error, time::Duration};

use rowlock::{LeaseLock, RunError};
use sea_orm::{ConnectionTrait as _, Database, DatabaseConnection, DbErr, Statement};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS price_list (id int PRIMARY KEY, price bigint, token bigint)";

/// Writes unless a later holder has written: a holder that was paused past its lease may come late.
async fn import(db: &DatabaseConnection, price: i64, token: i64) -> Result<bool, DbErr> {
    let sql = "INSERT INTO price_list VALUES (1, $1, $2) ON CONFLICT (id) DO UPDATE
        SET price = excluded.price, token = excluded.token WHERE price_list.token <= excluded.token";
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, [price.into(), token.into()]);
    Ok(db.execute_raw(statement).await?.rows_affected() == 1)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let db = Database::connect(std::env::var("DATABASE_URL")?).await?;
    let pool = db.get_postgres_connection_pool().clone();
    rowlock::migrate(&pool).await?;
    let lock = LeaseLock::new(pool);

    let mut last = 0;
    for price in [10, 20] {
        let ran = lock.run("price-list", Duration::from_secs(60), async |held| {
            db.execute_unprepared(TABLE).await?;
            let token = held.token().get();
            Ok::<_, DbErr>((token, import(&db, price, token).await?))
        });
        match ran.await {
            Ok((token, imported)) => {
                last = token;
                println!("imported the price {price} under token {last}: {imported}");
            }
            Err(RunError::Refused(refusal)) => println!("not now: {refusal}"),
            Err(error) => return Err(error.into()),
        }
    }
    println!("a late write of an earlier holder: {}", import(&db, 10, last - 1).await?);
    Ok(())
}
