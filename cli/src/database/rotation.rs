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
/// say. Connections that are open stay so.
pub async fn follow<DB>(pool: Pool<DB>, source: Arc<Source>, mut known: Secrets)
where
    DB: Database<Connection: Connection<Options: Server>>,
{
    let read = || {
        let source = source.clone();
        async move { spawn_blocking(move || source.secrets().ok()).await.ok().flatten() }
    };
    loop {
        sleep(AGAIN).await;
        let Some(mut now) = read().await else { continue };
        // A file may be missing, or empty, for a moment while it is replaced.
        if now.passwords.is_empty() {
            now.passwords.clone_from(&known.passwords);
        }
        if now == known {
            continue;
        }
        known = now;
        take_up(&pool, &source, &known);
    }
}

/// Uses what the files say now. A URL of another server or database is not followed: the keys that
/// are held are in this one.
fn take_up<DB>(pool: &Pool<DB>, source: &Source, now: &Secrets)
where
    DB: Database<Connection: Connection<Options: Server>>,
{
    now.keep();
    match <DB::Connection as Connection>::Options::read(now) {
        Ok(options) if options.address() == pool.connect_options().address() => {
            pool.set_connect_options(options);
            source.use_url(&now.url);
            tracing::info!("the password of the database has changed: new connections use it");
        }
        Ok(_) => tracing::warn!("the URL is that of another database now, which is not used until a restart"),
        Err(failure) => tracing::warn!(%failure, "the new URL of the database is not used"),
    }
}

#[cfg(test)]
mod tests {
    use sqlx::{MySql, mysql::MySqlConnectOptions};

    use super::*;
    use crate::{args::source::SourceArguments, secrets::masked};

    #[tokio::test]
    async fn commands_get_the_url_that_the_program_uses() {
        let [first, second, other] = ["app:first-word@db/app", "app:second-word@db/app", "app:third-word@db/other"]
            .map(|rest| format!("mysql://{rest}"));
        let source = Source::choose(&SourceArguments {
            database_url: Some(first.clone()),
            database_url_file: None,
            local: false,
            any_server: false,
            article_clients: None,
            connect_timeout: AGAIN,
        });
        let source = source.unwrap();
        let mut now = source.secrets().unwrap();
        let pool = Pool::<MySql>::connect_lazy_with(MySqlConnectOptions::read(&now).unwrap());
        assert_eq!(source.url(), first);
        now.url.clone_from(&second);
        take_up(&pool, &source, &now);
        assert_eq!((source.url(), &*masked("the second-word")), (second.clone(), "the ***"));
        now.url = other;
        take_up(&pool, &source, &now);
        assert_eq!((source.url(), &*masked("the third-word")), (second, "the ***"));
    }
}
