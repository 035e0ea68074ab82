//! `changes`: what operators did.

use anstyle::Style;
use rowlock::{Database, LeaseLock, admin::ChangeInfo};
use serde_json::{Value, json};

use crate::{
    args::keys::Changes,
    exit::Failure,
    format::{clock, precise, tabular},
    out::{self, printable},
};

pub async fn changes<DB: Database>(lock: &LeaseLock<DB>, asked: &Changes) -> Result<u8, Failure> {
    let changes = lock.changes(asked.name.as_deref(), asked.limit).await?;
    match asked.json {
        true => out::say_json(&changes.iter().map(object).collect()),
        false => out::say(table(&changes)),
    }
}

pub fn table(changes: &[ChangeInfo]) -> String {
    let row = |change: &ChangeInfo| {
        let cells = [&clock(change.at), &change.what, &change.name, &change.who, &change.detail];
        (Style::new(), cells.map(|cell| printable(cell)))
    };
    tabular(["CHANGED", "WHAT", "NAME", "WHO", "DETAIL"], changes.iter().map(row))
}

pub fn object(change: &ChangeInfo) -> Value {
    json!({
        "at": precise(change.at),
        "what": change.what,
        "who": change.who,
        "name": change.name,
        "detail": change.detail,
    })
}
