//! Contenders in a process of their own: the semaphore of redis-semaphore, a client of Redis for
//! Node, and the locks of other crates.

use std::{path::Path, process::Stdio, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Mutex,
};

use crate::{
    contest::{Contender, Ending, Round},
    error::Error,
    options::url,
    statistics::Summary,
    ways::own_prefix,
};

/// The folder with the package and its dependencies, beside a copy of the program.
const REDIS_SEMAPHORE: &str = "REDIS_SEMAPHORE";

/// The program of `benches/crates`.
pub const CRATES: &str = "BENCH_CRATES";

pub struct Program(Mutex<Process>);

struct Process {
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    /// Ends the process when it is dropped.
    _child: Child,
}

impl Program {
    /// Returns `None` if there is no folder with the package.
    pub fn redis_semaphore(server: &str, permits: u32) -> Result<Option<Arc<Self>>, Error> {
        let Some(folder) = url(REDIS_SEMAPHORE) else { return Ok(None) };
        // Node looks for packages beside the program.
        let program = Path::new(&folder).join("contender.mjs");
        std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/redis-semaphore/contender.mjs"), &program)?;
        let mut node = Command::new("node");
        node.arg(program).args([server, &format!("{}/permits", own_prefix()), &permits.to_string()]);
        Self::start(node).map(Some)
    }

    /// Starts one of the locks of the program that [`CRATES`] names.
    pub fn of_crate(program: &str, lock: &str, server: &str) -> Result<Arc<Self>, Error> {
        let mut command = Command::new(program);
        command.args([lock, server, &own_prefix()]);
        Self::start(command)
    }

    fn start(mut command: Command) -> Result<Arc<Self>, Error> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let (input, output) = child.stdin.take().zip(child.stdout.take()).ok_or("a contender has no pipes")?;
        Ok(Arc::new(Self(Mutex::new(Process { input, lines: BufReader::new(output).lines(), _child: child }))))
    }
}

impl Contender for Program {
    fn round(self: Arc<Self>, tasks: usize, span: Duration) -> Ending<Round> {
        Box::pin(async move {
            let mut process = self.0.lock().await;
            process.input.write_all(format!("{tasks} {}\n", span.as_millis()).as_bytes()).await?;
            loop {
                let line = process.lines.next_line().await?.ok_or("the program has ended")?;
                // pg_lease prints lines of its own.
                if let Some(nanos) = line.strip_prefix("round ") {
                    return round(nanos);
                }
            }
        })
    }
}

fn round(nanos: &str) -> Result<Round, Error> {
    let mut nanos = nanos.split(' ').map(str::parse::<i64>);
    let whole = nanos.next().ok_or("an empty round")??;
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
