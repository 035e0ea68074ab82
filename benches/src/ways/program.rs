//! The semaphore of redis-semaphore, a client of Redis for Node, in a process of its own.

use std::{process::Stdio, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Mutex,
};

use crate::{
    Error,
    contest::{Contender, Cycling, Ending, Round},
    options::url,
    statistics::Summary,
};

const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/redis-semaphore/contender.mjs");

/// The folder with the package and its dependencies, beside a copy of the program.
pub const FOLDER: &str = "REDIS_SEMAPHORE";

pub struct RedisSemaphore(Mutex<Process>);

struct Process {
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    /// Ends the process when it is dropped.
    _child: Child,
}

impl RedisSemaphore {
    /// Returns `None` if there is no folder with the package.
    pub fn new(server: &str, key: &str, permits: u32) -> Result<Option<Arc<Self>>, Error> {
        let Some(folder) = url(FOLDER) else { return Ok(None) };
        // Node looks for packages beside the program.
        let program = std::path::Path::new(&folder).join("contender.mjs");
        std::fs::copy(PROGRAM, &program)?;
        let mut node = Command::new("node");
        node.arg(program).args([server, key, &permits.to_string()]);
        let mut child = node.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let (input, output) = child.stdin.take().zip(child.stdout.take()).ok_or("node has no pipes")?;
        Ok(Some(Arc::new(Self(Mutex::new(Process { input, lines: BufReader::new(output).lines(), _child: child })))))
    }
}

impl Contender for RedisSemaphore {
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async { Err("redis-semaphore makes whole rounds only".into()) })
    }

    fn round(self: Arc<Self>, tasks: usize, span: Duration) -> Ending<Round> {
        Box::pin(async move {
            let mut process = self.0.lock().await;
            process.input.write_all(format!("{tasks} {}\n", span.as_millis()).as_bytes()).await?;
            let line = process.lines.next_line().await?.ok_or("node has ended")?;
            round(&line)
        })
    }
}

fn round(line: &str) -> Result<Round, Error> {
    let mut nanos = line.split(' ').map(str::parse::<i64>);
    let whole = nanos.next().ok_or("an empty line")??;
    let latencies = Summary::of(nanos.collect::<Result<_, _>>()?);
    Ok(Round { per_second: latencies.count() as f64 * 1e9 / whole as f64, attempts: 1.0, latencies })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_read_from_its_line() -> Result<(), Error> {
        let round = round("500000000 2000000 1000000 3000000")?;
        assert_eq!((round.per_second, round.latencies.percentile(50)), (6.0, Some(2_000_000)));
        assert!(super::round("").is_err() && super::round("5 x").is_err());
        Ok(())
    }
}
