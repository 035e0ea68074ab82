//! `list` and `watch`: the table, for people and for programs.

use std::io::IsTerminal as _;

use chrono::Utc;
use rowlock::{
    Database, Error, LeaseLock,
    admin::{ListOptions, LockInfo},
};
use serde_json::Value;

use crate::{
    args::keys::{List, Watch},
    exit::Failure,
    format::clock,
    keys::{
        names::pages,
        queues::Queues,
        rows::{objects, table},
    },
    out,
};

pub async fn list<DB: Database>(lock: &LeaseLock<DB>, list: &List) -> Result<u8, Failure> {
    let entries = all(lock, list.claimed).await?;
    let queues = Queues::if_possible(lock).await;
    if list.json {
        out::say_json(&Value::Array(objects(&entries, &queues)))
    } else {
        out::say(table(&entries, &queues))
    }
}

pub async fn watch<DB: Database>(lock: &LeaseLock<DB>, watch: &Watch) -> Result<u8, Failure> {
    // The screen is cleared together with the output of the table, to avoid flicker.
    let (top, rest) = if std::io::stdout().is_terminal() { ("\x1b[H\x1b[2J", "") } else { ("", "\n") };
    loop {
        let (entries, queues) = (all(lock, watch.claimed).await?, Queues::read(lock).await.unwrap_or_default());
        let table = table(&entries, &queues);
        out::say(format_args!("{top}{}  {} keys\n{table}{rest}", clock(Utc::now()), entries.len()))?;
        tokio::time::sleep(watch.every).await;
    }
}

async fn all<DB: Database>(lock: &LeaseLock<DB>, claimed: bool) -> Result<Vec<LockInfo>, Error> {
    pages(lock, &if claimed { ListOptions::default().claimed() } else { ListOptions::default() }).await
}
