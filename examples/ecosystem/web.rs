//! A web service (axum) on PostgreSQL, of which any number of instances run: each payment is made
//! once, and one instance settles the payments at each tick.
//!
//!     export DATABASE_URL=postgres://app@localhost/app
//!     cargo run -p rowlock-example-ecosystem --example web -- 127.0.0.1:8001    # and 8002, 8003
//!     curl -X POST "127.0.0.1:8001/payments/$(uuidgen)?account=alice&amount=30"

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::{error::Error, time::Duration};

use axum::{
    Router,
    extract::{Path, Query, State},
    http::StatusCode,
    routing::post,
};
use rowlock::{LeaseLock, RunError, Schedule, Schedules, Tick};
use serde::Deserialize;
use sqlx::{PgPool, Postgres, query, query_scalar};
use tokio::{net::TcpListener, signal};
use uuid::Uuid;

/// A crashed instance is replaced after this time.
const LEASE: Duration = Duration::from_secs(2);

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS account (id text PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
    CREATE TABLE IF NOT EXISTS payment (
        id uuid PRIMARY KEY, account text NOT NULL, amount bigint NOT NULL, settled timestamptz
    );
    CREATE TABLE IF NOT EXISTS settlement (slot timestamptz PRIMARY KEY, payments bigint NOT NULL);
    INSERT INTO account VALUES ('alice', 1000) ON CONFLICT DO NOTHING";

#[derive(Deserialize)]
struct Payment {
    account: String,
    amount: u32,
}

#[derive(Debug, thiserror::Error)]
enum Unpaid {
    #[error("the balance is too low")]
    Insufficient,
    #[error("the database")]
    Database(#[from] sqlx::Error),
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8001".into());
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    rowlock::migrate(&pool).await?;
    create_tables(&pool).await?;

    let payments = pool.clone();
    let settlement = Schedule::every("settlement", Duration::from_secs(1));
    let jobs = Schedules::new(pool.clone()).lease(LEASE).label(&address);
    let running = jobs.on(settlement, move |tick| settle(tick, payments.clone())).start().await?;

    let accounts = LeaseLock::new(pool).lease(LEASE);
    let service = Router::new().route("/payments/{id}", post(pay)).with_state(accounts);
    let listener = TcpListener::bind(&address).await?;
    println!("listening on {}", listener.local_addr()?);
    let stopped = async { drop(signal::ctrl_c().await) };
    axum::serve(listener, service).with_graceful_shutdown(stopped).await?;
    running.shutdown(Duration::from_secs(10)).await;
    Ok(())
}

/// Several instances may start at the same time.
async fn create_tables(pool: &PgPool) -> Result<(), Box<dyn Error>> {
    let lock = LeaseLock::new(pool.clone());
    let created = lock.transaction("create-tables", |mut tx| async move {
        sqlx::raw_sql(TABLES).execute(&mut *tx).await?;
        Ok::<_, sqlx::Error>(())
    });
    Ok(created.await?)
}

/// Makes a payment once, however often the client sends it. The commit depends on the lease, so a
/// paused instance does not change the balance under the next one.
async fn pay(
    State(accounts): State<LeaseLock<Postgres>>,
    Path(id): Path<Uuid>,
    Query(Payment { account, amount }): Query<Payment>,
) -> StatusCode {
    let paid = accounts.transaction(&account, |mut tx| async move {
        let claim = tx.claim().clone();
        let account = claim.key.as_str();
        let new = "INSERT INTO payment VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        let new = query(new).bind(id).bind(account).bind(i64::from(amount)).execute(&mut *tx).await?;
        if new.rows_affected() == 0 {
            return Ok(StatusCode::OK); // it was made before
        }
        let take = "UPDATE account SET balance = balance - $1 WHERE id = $2 AND balance >= $1";
        let taken = query(take).bind(i64::from(amount)).bind(account).execute(&mut *tx).await?;
        if taken.rows_affected() == 1 { Ok(StatusCode::CREATED) } else { Err(Unpaid::Insufficient) }
    });
    match paid.await {
        Ok(status) => status,
        Err(RunError::Work(Unpaid::Insufficient)) => StatusCode::PAYMENT_REQUIRED,
        // The payment was not made, or its commit is not known: the client sends it again.
        Err(error) => {
            eprintln!("payment {id}: {error}");
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

/// Settles the new payments together with the end of the tick.
async fn settle(tick: Tick<Postgres>, pool: PgPool) -> Result<(), Box<dyn Error + Send + Sync>> {
    let new = "WITH new AS (UPDATE payment SET settled = $1 WHERE settled IS NULL RETURNING id)
        INSERT INTO settlement SELECT $1, count(*) FROM new RETURNING payments";
    let settled = tick.transaction(&pool, async |mut tx| query_scalar(new).bind(tick.slot()).fetch_one(&mut *tx).await);
    let payments: i64 = settled.await?; // fails if another instance has the tick
    println!("settled {payments} payments at {}", tick.slot().format("%H:%M:%S"));
    Ok(())
}
