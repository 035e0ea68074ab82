//! `rowlock hold`: a key that is held for a script, which says when it is done.
//!
//! The script closes the program's stdin when its work has succeeded. Anything else that ends the
//! claim (a signal, the end of the script) says that the work has not: the claim ends as failed.

use std::{
    fs::{File, Metadata},
    io,
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    time::Duration,
};

use rowlock::{Database, LeaseLock, Status};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::retry_on_intr,
    process::{Pid, Signal, getppid},
};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::{
    args::claims::Hold,
    exit::{self, Failure},
    keys::{claiming::Claiming, claims},
    out,
    process::{
        descendants::Process,
        signals::{StopSignals, exit_code, listen, received},
    },
};

/// The interval at which the parent is looked for.
const LOOK: Duration = Duration::from_millis(250);
/// The signal whose exit code tells that the script has ended.
const GONE: Signal = Signal::HUP;

pub async fn hold<DB: Database>(lock: LeaseLock<DB>, hold: Hold) -> Result<u8, Failure> {
    let key = hold.key.as_str();
    let wait_of_work = hold.terms.wait_of_work()?;
    let mut stop = StopSignals::listen()?;
    // A claim that is held on a terminal is renewed whatever keys are pressed.
    let mut suspend = listen(tokio::signal::unix::SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut script = Script::watch(hold.parent)?;
    let claiming = Claiming::without_command(&lock, key, &hold.terms);
    let lease = tokio::select! {
        granted = claiming.wait_for(lock.acquire(key, wait_of_work), &mut stop) => granted?,
        _ = script.ended() => {
            claiming.settle(&mut stop).await;
            let text = format_args!("{key}: not taken: stdin was closed while it waited");
            return Err(Failure::new(claiming.refused, text));
        }
    };
    let lease = claiming.beside_no_reader(lease, &mut stop).await?;
    let lost = || Failure::new(exit::LOST, format_args!("{key}: lost; its work has to stop"));
    let printed = tokio::select! {
        biased;
        printed = claims::print_unless_asked(&lock, &lease, &mut stop) => printed,
        () = lease.lost() => Err(lost()),
    };
    if let Err(failure) = printed {
        return Err(claiming.put_back(lease, &mut stop, failure).await);
    }
    let mut code = loop {
        // A signal may have come while the claim was printed.
        if let Some(signal) = stop.asked() {
            break exit_code(signal);
        }
        tokio::select! {
            biased;
            () = lease.lost() => return Err(lost()),
            signal = stop.next() => break exit_code(signal),
            code = script.ended() => break code,
            () = received(&mut suspend) => {}
        }
    };
    if code == exit::OK {
        code = tokio::select! {
            biased;
            signal = stop.next() => exit_code(signal),
            is_ending = script.is_ending() => if is_ending { exit_code(GONE) } else { code },
        };
    }
    let status = if code == exit::OK { Status::Succeeded } else { Status::Failed };
    claiming.record(lease, status, &mut stop).await?;
    Ok(code)
}

/// The process that has started this one, and what it says.
struct Script {
    parent: Option<Pid>,
    /// Receives whether stdin was closed, or cannot be read any more.
    closed: oneshot::Receiver<io::Result<()>>,
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
            let _ = close.send(read_to_end());
        });
        Ok(Self { parent, closed })
    }

    /// Waits until stdin is closed or fails, or the parent is gone, and returns the exit code. A
    /// child of the parent may keep the other end of the pipe open.
    async fn ended(&mut self) -> u8 {
        loop {
            match timeout(LOOK, &mut self.closed).await {
                Ok(Ok(Err(error))) => {
                    out::print_error(format_args!("stdin cannot be read any more: {error}"));
                    return exit_code(GONE);
                }
                Ok(_) => return exit::OK,
                Err(_) if getppid() != self.parent => return exit_code(GONE),
                Err(_) => {}
            }
        }
    }

    /// Returns whether the parent ends soon after it has closed stdin. An interpreter closes its
    /// files before it ends, as after an error, and the kernel those of a process that was killed.
    async fn is_ending(&self) -> bool {
        sleep(LOOK).await;
        getppid() != self.parent || self.parent.and_then(Process::read).is_some_and(Process::is_ending)
    }
}

/// Reads stdin until it is closed.
fn read_to_end() -> io::Result<()> {
    let mut stdin = io::stdin().lock();
    loop {
        match io::copy(&mut stdin, &mut io::sink()) {
            // A process that shares it does not wait for its reads.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                retry_on_intr(|| poll(&mut [PollFd::new(&stdin, PollFlags::IN)], None))?;
            }
            read => return read.map(drop),
        }
    }
}

fn is_null_device() -> bool {
    let stdin = io::stdin().as_fd().try_clone_to_owned().and_then(|stdin| File::from(stdin).metadata());
    let device = |of: io::Result<Metadata>| of.ok().filter(|of| of.file_type().is_char_device()).map(|of| of.rdev());
    device(stdin).is_some_and(|stdin| device(std::fs::metadata("/dev/null")) == Some(stdin))
}
