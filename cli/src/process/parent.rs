//! The process that has started this one. Its end ends this process, too.

use rustix::process::getppid;

use crate::exit::{self, Failure};

/// Returns whether the parent has ended, so that this process has another one.
pub fn has_ended(parent: i32) -> bool {
    getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent)
}

/// Fails if the parent has ended already.
pub fn check(parent: i32) -> Result<(), Failure> {
    if has_ended(parent) {
        let text = "the command was not started: the rowlock process that started it has ended";
        return Err(Failure::new(exit::LOST, text));
    }
    Ok(())
}

/// On Linux, has this process killed when its parent ends, for whatever reason.
pub fn die_with(parent: i32) -> Result<(), Failure> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| {
            let text = format_args!("the program could not tie the command to its parent: {error}");
            Failure::new(exit::NOT_EXECUTABLE, text)
        })?;
        // The parent may have ended before the call.
        check(parent)?;
    }
    Ok(())
}
