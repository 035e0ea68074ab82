//! A job of apalis under a key: every instance has its worker, and one of them does the work of a
//! tick. A layer puts any task of apalis, or any service of tower, under a key.
//!
//!     export DATABASE_URL=postgres://app@localhost/app
//!     cargo run -p rowlock-example-ecosystem --example apalis_layer    # start it several times

#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use apalis::prelude::{BoxDynError, WorkerBuilder};
use apalis_cron::{CronScheduler, Tick};
use rowlock::{LeaseLock, RunError};
use sqlx::{PgPool, Postgres};
use tower::{Layer, Service};

const PERIOD: Duration = Duration::from_secs(4);

/// Runs the inner service under a key, or not at all.
#[derive(Clone)]
struct UnderKey {
    lock: LeaseLock<Postgres>,
    key: &'static str,
}

#[derive(Clone)]
struct Keyed<S> {
    under: UnderKey,
    inner: S,
}

impl<S> Layer<S> for UnderKey {
    type Service = Keyed<S>;

    fn layer(&self, inner: S) -> Keyed<S> {
        Keyed { under: self.clone(), inner }
    }
}

impl<S, R> Service<R> for Keyed<S>
where
    S: Service<R, Response: Send, Error: Into<BoxDynError> + Send, Future: Send> + Clone + Send + 'static,
    R: Send + 'static,
{
    /// Nothing, if the key was refused.
    type Response = Option<S::Response>;
    type Error = BoxDynError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxDynError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxDynError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let UnderKey { lock, key } = self.under.clone();
        // The one that is ready, and a copy for the next call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        Box::pin(async move {
            match lock.run(key, Duration::ZERO, async move |_held| inner.call(request).await).await {
                Ok(response) => Ok(Some(response)),
                Err(RunError::Work(error)) => Err(error.into()),
                Err(RunError::Refused(refusal)) => {
                    println!("not now: {refusal}");
                    Ok(None)
                }
                Err(RunError::Lost { key, .. }) => Err(format!("lost {key}, and cancelled the work").into()),
                Err(RunError::Other(error)) => Err(error.into()),
            }
        })
    }
}

async fn report(tick: Tick) -> Result<(), BoxDynError> {
    println!("ran the tick {}", tick.get_timestamp());
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    rowlock::migrate(&pool).await?;
    // The workers fire within a moment of each other: half of the period keeps a tick from running
    // twice.
    let lock = LeaseLock::new(pool).lease(PERIOD / 2).min_interval(PERIOD / 2);
    let worker = WorkerBuilder::new("reports")
        .backend(CronScheduler::new("*/4 * * * * *".parse::<cron::Schedule>()?))
        .layer(UnderKey { lock, key: "report" })
        .build(report);
    let stop = async { tokio::signal::ctrl_c().await };
    Ok(worker.run_until(stop).await?)
}
