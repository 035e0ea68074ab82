//! Redis: `SET key value NX PX`, and a script that deletes the key if the value is still the
//! caller's own.

use std::time::Duration;

use ::redis::{Client, ExistenceCheck, Script, SetExpiry, SetOptions, aio::MultiplexedConnection};
use uuid::Uuid;

use super::{Ask, Lock};
use crate::error::Error;

const RELEASE: &str =
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

/// One connection, which the commands of all tasks share.
pub struct Redis {
    connection: MultiplexedConnection,
    release: Script,
    /// Separates the keys of one run from those of another.
    prefix: String,
    lease: Duration,
}

impl Redis {
    pub async fn new(url: &str, prefix: &str) -> Result<Self, Error> {
        let connection = Client::open(url)?.get_multiplexed_async_connection().await?;
        let release = Script::new(RELEASE);
        release.prepare_invoke().load_async(&mut connection.clone()).await?;
        Ok(Self { connection, release, prefix: prefix.to_owned(), lease: Duration::from_secs(30) })
    }

    pub fn lasting(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    fn name(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Lock for Redis {
    type Held = String;

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<String>, Error> {
        let value = Uuid::new_v4().to_string();
        let mut set = ::redis::cmd("SET");
        let options = SetOptions::default()
            .conditional_set(ExistenceCheck::NX)
            .with_expiration(SetExpiry::PX(u64::try_from(self.lease.as_millis())?));
        set.arg(self.name(ask.key)).arg(&value).arg(options);
        let done: Option<String> = set.query_async(&mut self.connection.clone()).await?;
        Ok(done.map(|_| value))
    }

    async fn release(&self, ask: &Ask<'_>, value: String) -> Result<(), Error> {
        let mut release = self.release.key(self.name(ask.key));
        let deleted: i64 = release.arg(value).invoke_async(&mut self.connection.clone()).await?;
        if deleted == 1 { Ok(()) } else { Err("the key was gone".into()) }
    }
}

/// Whether a write is on the disk before it is answered, and the settings that decide this.
pub async fn durability(url: &str) -> Result<(bool, String), Error> {
    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    let mut settings = Vec::new();
    for name in ["appendonly", "appendfsync"] {
        let found: Vec<String> = ::redis::cmd("CONFIG").arg("GET").arg(name).query_async(&mut connection).await?;
        settings.push(found.into_iter().nth(1).unwrap_or_else(|| "unknown".into()));
    }
    let durable = settings == ["yes", "always"];
    Ok((durable, format!("appendonly {}, appendfsync {}", settings[0], settings[1])))
}
