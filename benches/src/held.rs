//! The cost of keys that are held for long: connections, memory, and statements that renew them.

use std::{process::Stdio, time::Duration};

use clap::Args;
use sqlx::Pool;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::{sleep, timeout},
};

use crate::{
    contender::URL,
    database::{Kind, Observer, Site, at_own_site, on, pool},
    error::Error,
    holder::{Renewed, Taken},
    options::{Common, seconds},
    report::{Line, Report, Shown, shown},
    speak::Speak,
    statistics::ratio,
};

/// How often the server is asked for its connections.
const LOOK: Duration = Duration::from_millis(50);
/// How long acquiring all keys may last, and how long the process may take to end after its last
/// report.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,
    /// How many keys are held.
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// How long the keys are held, once all of them are acquired.
    #[arg(long, default_value = "15", value_parser = seconds)]
    seconds: Duration,
    /// The lease in seconds; it is renewed every third of this time.
    #[arg(long, default_value = "30", value_parser = seconds)]
    lease: Duration,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let mut report = Report::new(options.common.csv.as_deref(), Shown::default())?;
    let Options { keys, seconds, lease, .. } = options;
    println!("{keys} keys are held for {seconds:?} with a lease of {lease:?}, in a process of its own.");
    println!(
        "connections: at most, of that database; statements: as the server counts them (of the whole server on MySQL and MariaDB; SQLite counts none)."
    );
    println!("bytes: resident memory that is more with all keys held than with none, for each.");
    println!("processor: the time of the process, in percent of one processor; and for a renewal.\n");
    println!(
        "| server | keys | connections | bytes a lease | renewals/s | statements for 100 renewals | processor % | µs a renewal |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    for (kind, server) in options.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        eprintln!("held {}: {} keys", kind.name(), options.keys);
        let Seen { taken, renewed, connections, statements } = held::<DB>(kind, site, options).await?;
        if renewed.renewals == 0 {
            return Err("no renewal was counted: hold the keys for longer than a third of the lease".into());
        }
        let line = Line {
            scenario: "held".to_owned(),
            server: kind.name().to_owned(),
            contender: "rowlock".to_owned(),
            size: options.keys,
            per_second: Some(renewed.renewals as f64 / options.seconds.as_secs_f64()),
            connections: connections.map(|most| most as f64),
            bytes_per_lease: taken.bytes().map(|bytes| bytes / options.keys as f64),
            statements_per_100: statements.and_then(|count| ratio(100.0 * count as f64, renewed.renewals as f64)),
            ..Line::default()
        };
        let (bytes, statements) = (shown(line.bytes_per_lease, 0), shown(line.statements_per_100, 2));
        let (connections, rate) = (shown(line.connections, 0), shown(line.per_second, 0));
        let server = kind.name();
        let processor = renewed.processor as f64 / 1e9;
        let percent = shown(Some(100.0 * processor / options.seconds.as_secs_f64()), 1);
        let micros = shown(ratio(processor * 1e6, renewed.renewals as f64), 1);
        println!(
            "| {server} | {} | {connections} | {bytes} | {rate} | {statements} | {percent} | {micros} |",
            options.keys
        );
        report.line(&line)
    })
    .await
}

/// What was seen of the process that holds the keys.
struct Seen {
    taken: Taken,
    renewed: Renewed,
    /// The most connections, and the statements, where the server counts them.
    connections: Option<i64>,
    statements: Option<i64>,
}

/// Starts the process, and reads the server's connections as long as the process renews.
async fn held<DB: Speak>(kind: Kind, site: &Site, options: &Options) -> Result<Seen, Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["holder", "--database", kind.name(), "--keys", &options.keys.to_string()]);
    command.args(["--seconds", &options.seconds.as_secs_f64().to_string()]);
    command.args(["--lease", &options.lease.as_secs_f64().to_string()]);
    let mut child =
        command.env(URL, &site.url).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("the process has no stdout")?).lines();
    let (observer, pool) = (Observer::<DB>::new(site).await?, pool::<DB>(&site.url, 1).await?);
    let line = timeout(PATIENCE, lines.next_line()).await??.ok_or("the process holds nothing")?;
    let taken = serde_json::from_str(&line)?;
    let (before, mut looks) = (observer.statements().await?, 0);
    let mut most: Option<i64> = None;
    let renewed = loop {
        // The connections that acquired the keys are closed first.
        tokio::select! {
            line = lines.next_line() => break serde_json::from_str(&line?.ok_or("the process renewed nothing")?)?,
            () = sleep(LOOK) => {}
        }
        most = most.max(connections(&pool).await?);
        looks += i64::from(most.is_some());
    };
    let statements = observer.since(before).await?.map(|count| count - looks);
    let status = timeout(PATIENCE, child.wait()).await??;
    if !status.success() {
        return Err(format!("the process failed: {status}").into());
    }
    Ok(Seen { taken, renewed, connections: most, statements })
}

/// The connections of the process, as the server counts them: all except the two that ask.
async fn connections<DB: Speak>(observer: &Pool<DB>) -> Result<Option<i64>, Error> {
    let Some(sql) = DB::CONNECTIONS else { return Ok(None) };
    let row = DB::row(&mut *observer.acquire().await?, sql, &[]).await?.ok_or("the server does not count")?;
    Ok(Some(DB::number(&row, 0)? - 2))
}
