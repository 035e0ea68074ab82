//! `rowlock hold`: a key that is held for a script, which says when it is done.
//!
//! The script closes the program's stdin when its work has succeeded. Anything else that ends the
//! claim (a signal, the end of the script) says that the work has not: the claim ends as failed.

use std::{
    fs::{File, Metadata},
    io::{ErrorKind, Read as _},
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    time::Duration,
};

use rowlock::{Database, LeaseLock, Status};
use rustix::process::{Pid, Signal, getppid};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::{
    args::claims::Hold,
    exit::{self, Failure},
    keys::{
        beside::refuse_beside_readers,
        claims,
        run::Job,
        waiting::{Wait, Waited},
    },
    process::{
        descendants::is_ending,
        signals::{StopSignals, listen, number, received},
    },
};

/// How long the database has to record the end of the claim.
const GRACE: Duration = Duration::from_secs(10);
/// The interval at which the parent is looked for.
const LOOK: Duration = Duration::from_millis(250);

pub async fn hold<DB: Database>(lock: LeaseLock<DB>, hold: Hold) -> Result<u8, Failure> {
    let key = hold.key.as_str();
    let wait_of_work = hold.terms.wait_of_work()?;
    let mut stop = StopSignals::listen()?;
    // A claim that is held on a terminal is renewed whatever keys are pressed.
    let mut suspend = listen(tokio::signal::unix::SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut script = Script::watch(hold.parent)?;
    let wait = Wait { keys: vec![key], grace: GRACE, refused: hold.terms.refused_exit_code };
    let waited = tokio::select! {
        waited = wait.for_request(&lock, &mut stop, lock.acquire(key, wait_of_work)) => Some(waited?),
        _ = script.ended() => None,
    };
    let lease = match waited {
        Some(Waited::Granted(lease)) => lease,
        Some(Waited::Over(code)) => return Ok(code),
        None => {
            let _ = stop.within(GRACE, lock.shutdown(Duration::MAX)).await;
            let text = format_args!("{key}: not taken: stdin was closed while it waited");
            return Err(Failure::new(hold.terms.refused_exit_code, text));
        }
    };
    let job = Job::without_command(key, GRACE, hold.terms.rules);
    let lost = || Failure::new(exit::LOST, format_args!("{key}: lost; its work has to stop"));
    let beside = refuse_beside_readers(&lock, &[key], hold.terms.refused_exit_code).await;
    let printed = tokio::select! {
        biased;
        Err(failure) = std::future::ready(beside) => Err(failure),
        printed = claims::print_unless_asked(&lock, lease.claim(), lease.taken_over_from().cloned(), &mut stop) => printed,
        () = lease.lost() => Err(lost()),
    };
    if let Err(failure) = printed {
        return Err(job.put_back(&lock, lease, &mut stop, failure).await);
    }
    let end = loop {
        // A signal may have come while the claim was printed.
        if let Some(signal) = stop.asked() {
            break End::Asked(signal);
        }
        tokio::select! {
            biased;
            () = lease.lost() => return Err(lost()),
            end = script.ended() => break end,
            signal = stop.next() => break End::Asked(signal),
            () = received(&mut suspend) => {}
        }
    };
    job.record(lease, end.status(), &mut stop).await?;
    Ok(end.code())
}

/// What ends a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The script has closed stdin.
    Closed,
    /// The script is gone.
    Gone,
    Asked(Signal),
}

impl End {
    fn status(self) -> Status {
        match self {
            Self::Closed => Status::Succeeded,
            Self::Gone | Self::Asked(_) => Status::Failed,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Closed => exit::OK,
            Self::Gone => exit::SIGNAL + number(Signal::HUP),
            Self::Asked(signal) => exit::SIGNAL + number(signal),
        }
    }
}

/// The process that has started this one, and what it says.
struct Script {
    parent: Option<Pid>,
    /// Whether the parent was ending when stdin was closed.
    closed: oneshot::Receiver<bool>,
}

impl Script {
    /// Reads stdin to its end, in a thread of its own: a read of stdin cannot be cancelled.
    fn watch(parent: Option<Pid>) -> Result<Self, Failure> {
        if is_null_device() {
            let text = "stdin is /dev/null, and would end the claim at once: give `rowlock hold` a pipe \
                        (`coproc`, subprocess.PIPE), or use `rowlock acquire`";
            return Err(Failure::new(exit::USAGE, text));
        }
        let (close, closed) = oneshot::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                match std::io::stdin().lock().read(&mut bytes) {
                    Ok(0) => break,
                    Err(error) if error.kind() != ErrorKind::Interrupted => break,
                    Ok(_) | Err(_) => {}
                }
            }
            // The kernel marks a process that ends before it closes the files of that process.
            let _ = close.send(parent.and_then(is_ending).unwrap_or_default());
        });
        Ok(Self { parent, closed })
    }

    /// Waits until stdin is closed or the parent is gone. A child of the parent may keep the other
    /// end of the pipe open.
    async fn ended(&mut self) -> End {
        loop {
            match timeout(LOOK, &mut self.closed).await {
                Ok(Ok(false)) if cfg!(target_os = "linux") => return End::Closed,
                Ok(Ok(false)) => {
                    // Elsewhere, only the parent's end itself can be seen.
                    sleep(LOOK).await;
                    return if getppid() == self.parent { End::Closed } else { End::Gone };
                }
                Ok(_) => return End::Gone,
                Err(_) if getppid() != self.parent => return End::Gone,
                Err(_) => {}
            }
        }
    }
}

fn is_null_device() -> bool {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().and_then(|stdin| File::from(stdin).metadata());
    let device =
        |of: std::io::Result<Metadata>| of.ok().filter(|of| of.file_type().is_char_device()).map(|of| of.rdev());
    device(stdin).is_some_and(|stdin| device(std::fs::metadata("/dev/null")) == Some(stdin))
}
