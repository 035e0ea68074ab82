//! Passwords that change while the program runs.

use std::{sync::Arc, time::Duration};

use sqlx::{Connection, Database, Pool};
use tokio::{task::spawn_blocking, time::sleep};

use crate::database::{
    server::Server,
    source::{Secrets, Source},
};

/// The pause before another look at the files.
const AGAIN: Duration = Duration::from_secs(5);

/// Reads the files with the URL and with passwords again, and opens new connections with what they
/// say. Connections that are open stay so. A URL of another server or database is not followed: the
/// keys that are held are in this one.
pub async fn follow<DB>(pool: Pool<DB>, source: Arc<Source>)
where
    DB: Database<Connection: Connection<Options: Server>>,
{
    let read = || {
        let source = source.clone();
        async move { spawn_blocking(move || source.secrets().ok()).await.ok().flatten() }
    };
    let Some(mut known) = read().await else { return };
    loop {
        sleep(AGAIN).await;
        // A file may be missing, or empty, for a moment while it is replaced.
        let is_whole = |now: &Secrets| !now.passwords.is_empty() || known.passwords.is_empty();
        let Some(now) = read().await.filter(|now| *now != known && is_whole(now)) else { continue };
        now.keep();
        known = now;
        match <DB::Connection as Connection>::Options::read(&known) {
            Ok(options) if options.address() == pool.connect_options().address() => {
                pool.set_connect_options(options);
                tracing::info!("the password of the database has changed: new connections use it");
            }
            Ok(_) => tracing::warn!("the URL is that of another database now, which is not used until a restart"),
            Err(failure) => tracing::warn!(%failure, "the new URL of the database is not used"),
        }
    }
}
