//! The descendants of the command, read from `/proc` where the system has it.
//!
//! On Linux, this program is the reaper of its descendants. A process whose parent has ended
//! becomes its child, so that none leaves the tree, regardless of the group or session that it
//! creates.

use std::{
    collections::{HashMap, HashSet},
    sync::OnceLock,
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, getpid, kill_process, test_kill_process, waitpid},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: Pid,
    parent: Option<Pid>,
    /// Its group; `None` if the leader of that is outside of the PID namespace.
    pub group: Option<Pid>,
    pub session: Option<Pid>,
    state: State,
    /// When it began, in ticks of the system. Its number may be given to another process later.
    began: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alive,
    Stopped,
    /// The process is about to end. The kernel says so before it closes the process's files.
    Ending,
    /// The process has ended, and its parent has not waited for it.
    Dead,
}

impl Process {
    /// Reads one process; `None` where the system does not provide it.
    pub fn read(pid: Pid) -> Option<Self> {
        proc_is_ours().then_some(())?;
        parse(&std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?)
    }

    pub fn is_stopped(self) -> bool {
        self.state == State::Stopped
    }

    /// Returns whether the process has ended or is about to.
    pub fn is_ending(self) -> bool {
        matches!(self.state, State::Ending | State::Dead)
    }

    /// Returns whether the process was started with all of these variables (`NAME=VALUE`).
    pub fn has(self, variables: &[String]) -> bool {
        let Ok(own) = std::fs::read(format!("/proc/{}/environ", self.pid.as_raw_nonzero())) else { return false };
        let has = |variable: &String| own.split(|byte| *byte == 0).any(|one| one == variable.as_bytes());
        !variables.is_empty() && variables.iter().all(has)
    }

    /// Returns whether the process created a session of its own, as daemons do.
    pub fn is_daemon(self) -> bool {
        // `getsid` has no number for a session whose leader is outside of the PID namespace.
        Self::read(getpid()).is_some_and(|own| own.session != self.session)
    }
}

/// Makes this program the parent of its descendants whose own parents end.
pub fn become_subreaper() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_child_subreaper(Some(getpid())) {
        tracing::debug!(%error, "orphans of the command go to another reaper");
    }
}

/// The descendants that this process had before its first command.
static EARLIER: OnceLock<Vec<Process>> = OnceLock::new();

/// From now on, the descendants of now, and what is below them, are not those of a command. A shell
/// that became this program by `exec` had started them.
pub fn leave_earlier_ones() {
    EARLIER.get_or_init(|| all().map(|all| below(getpid(), &all)).unwrap_or_default());
}

/// Sends a signal to all of these. Returns one that may not be signalled, if there is any.
pub fn send(processes: &[Process], signal: Signal) -> Option<Pid> {
    let mut refused = None;
    for process in processes {
        if is_refused(kill_process(process.pid, signal)) {
            refused.get_or_insert(process.pid);
        }
    }
    refused
}

/// Returns whether a process that was signalled goes on, since it is another user's, as under
/// `sudo`. One that has ended before is no error.
pub fn is_refused(sent: Result<(), Errno>) -> bool {
    sent == Err(Errno::PERM)
}

/// Returns what is said of such a process.
pub fn not_permitted(refused: Pid) -> String {
    let pid = refused.as_raw_nonzero();
    format!("process {pid} is another user's and cannot be signalled: waiting until it has ended")
}

/// Returns whether a process has a descendant that may not be signalled.
pub fn has_refused(root: Pid) -> bool {
    let refuses = |process: &Process| process.state != State::Dead && is_refused(test_kill_process(process.pid));
    all().is_some_and(|all| below(root, &all).iter().any(refuses))
}

/// Returns the descendants that are alive, also those that may not be signalled; `None` where the
/// system does not provide them.
pub fn alive() -> Option<Vec<Process>> {
    let mut processes = below(getpid(), &all()?);
    leave(EARLIER.get().map_or(&[], Vec::as_slice), &mut processes);
    processes.retain(|process| process.state != State::Dead);
    Some(processes)
}

/// Returns the first child of a process that is alive.
pub fn child_of(parent: Pid) -> Option<Pid> {
    alive()?.into_iter().find(|process| process.parent == Some(parent)).map(|process| process.pid)
}

/// Returns those of [`alive`] for which `counts` holds, and their descendants.
pub fn alive_with(counts: impl Fn(&Process) -> bool) -> Option<Vec<Process>> {
    let mut processes = alive()?;
    let found = with_descendants(&processes, counts);
    processes.retain(|process| found.contains(&process.pid));
    Some(processes)
}

/// Removes earlier processes, and their descendants.
fn leave(earlier: &[Process], processes: &mut Vec<Process>) {
    let is_earlier = |process: &Process| earlier.iter().any(|one| (one.pid, one.began) == (process.pid, process.began));
    let left = with_descendants(processes, is_earlier);
    processes.retain(|process| !left.contains(&process.pid));
}

/// Returns the numbers of those for which `counts` holds, and of their descendants. Each process
/// comes after its parent.
fn with_descendants(processes: &[Process], counts: impl Fn(&Process) -> bool) -> HashSet<Pid> {
    let mut found = HashSet::new();
    for process in processes {
        if counts(process) || process.parent.is_some_and(|parent| found.contains(&parent)) {
            found.insert(process.pid);
        }
    }
    found
}

/// Returns whether a shell could continue this process group after it is stopped. Such a shell is
/// the parent of a member, in the same session and in another group. A process that a member has
/// started, such as this one, is not a shell.
pub fn has_shell(group: Pid) -> bool {
    let Some(all) = all() else { return true };
    let (group, own) = (Some(group), Some(getpid()));
    let is_member = |pid: Option<Pid>| all.iter().any(|process| Some(process.pid) == pid && process.group == group);
    let is_shell = |process: &Process, of: &Process| {
        Some(process.pid) == of.parent
            && process.session == of.session
            && process.group != group
            && !is_member(process.parent)
    };
    let mut members = all.iter().filter(|process| process.group == group && process.parent != own);
    members.any(|member| all.iter().any(|process| is_shell(process, member)))
}

/// Returns whether this process is in a group that has a number here.
pub fn has_group() -> bool {
    Process::read(getpid()).is_none_or(|own| own.group.is_some())
}

/// Returns whether this process is in a group. It is in none that has a number if its leader is
/// outside of the PID namespace, which `getpgrp` does not allow for.
pub fn is_own_group(group: Pid) -> bool {
    Process::read(getpid()).is_none_or(|own| own.group == Some(group))
}

/// Waits for adopted children that have ended, except for those of its own, for which another part
/// of the program waits.
pub fn reap(is_own: impl Fn(Pid) -> bool) {
    let own = getpid();
    for process in all().unwrap_or_default() {
        if process.parent == Some(own) && process.state == State::Dead && !is_own(process.pid) {
            let _ = waitpid(Some(process.pid), WaitOptions::NOHANG);
        }
    }
}

/// Returns whether `/proc` exists and shows this process under its own number. In a PID namespace
/// that has kept the `/proc` of another one, the numbers denote other processes.
pub fn proc_is_ours() -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == std::process::id().to_string().as_str())
}

fn all() -> Option<Vec<Process>> {
    proc_is_ours().then_some(())?;
    let entries = std::fs::read_dir("/proc").ok()?;
    let stats = entries.flatten().filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    Some(
        stats.filter_map(|entry| std::fs::read(entry.path().join("stat")).ok().and_then(|stat| parse(&stat))).collect(),
    )
}

/// Parses a number. One that is not positive stands for none.
fn number(text: &str) -> Option<Pid> {
    text.parse().ok().filter(|number: &i32| *number > 0).and_then(Pid::from_raw)
}

/// Parses `pid (name) state parent group session ...`; the ninth field is the flags, the twentieth
/// the number of threads, and the twenty-second the beginning. The name may contain any character.
fn parse(stat: &[u8]) -> Option<Process> {
    const EXITING: u32 = 0x4; // PF_EXITING
    let stat = String::from_utf8_lossy(stat);
    let pid = number(stat.split_once(' ')?.0)?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    let (parent, group, session) = (number(fields.next()?), number(fields.next()?), number(fields.next()?));
    let flags: u32 = fields.nth(2)?.parse().ok()?;
    let threads: u32 = fields.nth(10)?.parse().ok()?;
    let began = fields.nth(1)?.parse().ok()?;
    let state = match state {
        // The first thread may have ended before the others.
        "Z" | "X" if threads <= 1 => State::Dead,
        _ if threads <= 1 && flags & EXITING != 0 => State::Ending,
        "T" => State::Stopped,
        _ => State::Alive,
    };
    Some(Process { pid, parent, group, session, state, began })
}

fn below(root: Pid, all: &[Process]) -> Vec<Process> {
    let mut children: HashMap<Option<Pid>, Vec<Process>> = HashMap::new();
    for process in all {
        children.entry(process.parent).or_default().push(*process);
    }
    let mut found = children.remove(&Some(root)).unwrap_or_default();
    let mut seen = 0;
    while let Some(process) = found.get(seen) {
        found.extend(children.remove(&Some(process.pid)).unwrap_or_default());
        seen += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Errno, Pid, Process, State, below, is_refused, leave, parse};

    fn process(pid: i32, parent: i32) -> Process {
        let [parent, group, session] = [parent, 7, 1].map(Pid::from_raw);
        Process { pid: Pid::from_raw(pid).unwrap(), parent, group, session, state: State::Alive, began: 1 }
    }

    #[test]
    fn a_name_may_have_anything_in_it() {
        let with_flags = |state, flags, threads| {
            let stat = format!("7 (a) Z 9 (b) {state} 3 7 1 0 -1 {flags} 90 0 0 0 0 0 0 0 20 0 {threads} 0 1 2 3\n");
            parse(stat.as_bytes())
        };
        let read = |state, threads| with_flags(state, 4_194_304, threads);
        assert_eq!(read("S", 1), Some(process(7, 3)));
        assert_eq!(read("Z", 1), Some(Process { state: State::Dead, ..process(7, 3) }));
        assert_eq!(read("T", 1), Some(Process { state: State::Stopped, ..process(7, 3) }));
        assert_eq!(read("Z", 2), Some(process(7, 3)), "another thread goes on");
        assert_eq!(with_flags("R", 4_194_308, 1), Some(Process { state: State::Ending, ..process(7, 3) }));
        assert_eq!(with_flags("R", 4_194_308, 2), Some(process(7, 3)), "another thread goes on");
        assert_eq!(parse(b"7 (a"), None);
    }

    #[test]
    fn descendants_are_found_in_any_order() {
        let all = [process(5, 4), process(9, 1), process(4, 2), process(3, 2), process(2, 1)];
        let found = |root| -> Vec<i32> {
            let below = below(Pid::from_raw(root).unwrap(), &all);
            below.iter().map(|process| process.pid.as_raw_nonzero().get()).collect()
        };
        assert_eq!((found(2), found(5)), (vec![4, 3, 5], vec![]));
    }

    #[test]
    fn only_a_process_that_goes_on_has_refused_a_signal() {
        let sent = [Ok(()), Err(Errno::SRCH), Err(Errno::PERM)];
        assert_eq!(sent.map(is_refused), [false, false, true]);
    }

    /// The parent of one has ended since, and the number of one belongs to another process.
    #[test]
    fn what_was_there_before_is_left_with_its_descendants() {
        let earlier = [process(2, 1), process(3, 2), process(4, 1), process(5, 1)];
        let now = [process(2, 1), process(6, 2), process(5, 1), process(7, 1), process(8, 7), process(9, 3)];
        let again = Process { began: 2, ..process(4, 1) };
        let mut left = below(Pid::from_raw(1).unwrap(), &[&now[..], &[again, process(3, 1)]].concat());
        leave(&earlier, &mut left);
        assert_eq!(left, [process(7, 1), again, process(8, 7)]);
    }
}
