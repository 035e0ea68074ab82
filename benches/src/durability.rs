//! The durability of a COMMIT: rates of servers that may lose one are not comparable.

use std::path::Path;

use crate::{
    database::{Kind, Site, patient_pool},
    error::Error,
    options::url,
    speak::Speak,
    ways::redis,
};

/// Prints the server's settings, and a notice if it is not durable.
pub async fn show<DB: Speak>(kind: Kind, site: &Site) -> Result<(), Error> {
    let (sql, names) = DB::SETTINGS;
    let pool = patient_pool::<DB>(&site.url, 1).await?;
    let row = DB::row(&mut *pool.acquire().await?, sql, &[]).await?.ok_or("the server does not tell its settings")?;
    let values = (0..names.len()).map(|column| DB::text(&row, column)).collect::<Result<Vec<_>, _>>()?;
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    let settings: Vec<String> = names.iter().zip(&values).map(|(name, value)| format!("{name} {value}")).collect();
    let in_memory = site.folder().is_some_and(is_in_memory);
    let place = if in_memory { ", a file in memory" } else { "" };
    println!("\n{}: {}{place}{}", kind.name(), settings.join(", "), verdict(DB::durable(&values) && !in_memory));
    Ok(())
}

/// Prints the settings of the two Redis servers, where their URLs are set.
pub async fn show_redis() -> Result<(), Error> {
    for (name, variable) in [("redis", "REDIS_URL"), ("redis-durable", "REDIS_DURABLE_URL")] {
        let Some(url) = url(variable) else {
            println!("{name}: skipped, {variable} is not set");
            continue;
        };
        let (durable, settings) = redis::durability(&url).await.map_err(|error| format!("{variable}: {error}"))?;
        println!("{name}: {settings}{}", verdict(durable));
    }
    Ok(())
}

/// Whether the files of a folder are lost with the power.
#[cfg(target_os = "linux")]
fn is_in_memory(folder: &Path) -> bool {
    const TMPFS: rustix::fs::FsWord = 0x0102_1994;
    rustix::fs::statfs(folder).is_ok_and(|found| found.f_type == TMPFS)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_: &Path) -> bool {
    false
}

fn verdict(durable: bool) -> &'static str {
    if durable { "" } else { ": NOT DURABLE" }
}
