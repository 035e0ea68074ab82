//! What a command prints, as far as it is kept; and `output`, which shows it.

use std::{
    collections::VecDeque,
    io::IsTerminal as _,
    sync::{Arc, Mutex, PoisonError},
};

use chrono::{DateTime, Utc};
use rowlock::{Database, Schedules, admin::RunInfo};

use crate::{
    args::schedules::Output,
    exit::{Failure, REFUSED},
    format::clock,
    out,
};

/// How many runs are searched for the one that is asked for.
const RUNS: u32 = 1_000;
/// The most bytes that say how much was cut off.
const CUT: usize = 40;

/// The last bytes of both streams of a command, in the order in which they came. Clones share them.
#[derive(Clone)]
pub struct Tail(Arc<Mutex<Kept>>);

struct Kept {
    bytes: VecDeque<u8>,
    most: usize,
    cut: usize,
}

impl Tail {
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Kept { bytes: VecDeque::new(), most, cut: 0 })))
    }

    pub fn add(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes.extend(bytes);
        let over = kept.bytes.len().saturating_sub(kept.most);
        kept.bytes.drain(..over);
        kept.cut += over;
    }

    /// Returns what is kept, with a first line that says how much is not. `None` if there is
    /// nothing to keep.
    pub fn take(&self) -> Option<Vec<u8>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut bytes, mut cut) = (Vec::from(std::mem::take(&mut kept.bytes)), kept.cut);
        if bytes.is_empty() || kept.most == 0 {
            return None;
        }
        if cut == 0 {
            return Some(bytes);
        }
        let over = (bytes.len() + CUT).saturating_sub(kept.most).min(bytes.len());
        cut += bytes.drain(..over).count();
        Some([format!("[{cut} bytes cut off]\n").as_bytes(), &bytes].concat())
    }
}

/// Returns whether a slot is this time, or is shown as it: in whole seconds.
fn is_shown_as(slot: DateTime<Utc>, time: DateTime<Utc>) -> bool {
    slot == time || (time.timestamp_subsec_nanos() == 0 && slot.timestamp() == time.timestamp())
}

/// Prints what a run has printed.
pub async fn output<DB: Database>(schedules: &Schedules<DB>, asked: &Output) -> Result<u8, Failure> {
    let name = asked.name.as_str();
    let runs = schedules.history(name, RUNS).await?;
    let is_asked_for = |run: &&RunInfo| {
        run.attempt > 0
            && asked.slot.is_none_or(|slot| is_shown_as(run.slot, slot))
            && asked.attempt.is_none_or(|attempt| run.attempt == attempt)
    };
    // The runs of a schedule that was removed stay.
    let info = schedules.inspect(name).await?;
    let goes_on = info
        .as_ref()
        .filter(|info| info.running)
        .map(|info| format!("attempt {} runs now on {}: its output is kept at its end", info.attempt, info.by));
    let Some(run) = runs.iter().find(is_asked_for) else {
        if let Some(goes_on) = goes_on {
            return Err(Failure::new(REFUSED, format_args!("{name}: {goes_on}")));
        }
        if info.is_none() && runs.is_empty() {
            return Err(Failure::no_schedule(name));
        }
        let text = format_args!("{name:?} has no such run among its last {RUNS}: `rowlock runs {name}` lists them");
        return Err(Failure::new(REFUSED, text));
    };
    if let Some(goes_on) = goes_on.filter(|_| asked.slot.is_none() && asked.attempt.is_none()) {
        out::print_info(format_args!("{name}: {goes_on}; this is of the run before"));
    }
    let Some(output) = schedules.output(name, run.slot, run.attempt).await? else {
        let (slot, attempt) = (clock(run.slot), run.attempt);
        let text = format_args!(
            "nothing is kept of attempt {attempt} at the tick of {slot}: it printed nothing, was lost, or its job keeps none"
        );
        return Err(Failure::new(REFUSED, text));
    };
    match std::io::stdout().is_terminal() {
        true => out::say(lines(&output)),
        false => out::say_bytes(&output),
    }
}

/// Returns an output as text. What a command prints must not control the terminal of its reader.
pub fn lines(output: &[u8]) -> String {
    String::from_utf8_lossy(output).lines().map(out::printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_are_kept_with_what_was_cut_off() {
        let tail = Tail::new(100);
        assert_eq!(tail.take(), None);
        tail.add(b"one\n");
        tail.add(b"two");
        assert_eq!(tail.take().unwrap(), b"one\ntwo");
        let tail = Tail::new(100);
        for number in 0..30 {
            tail.add(format!("line {number:03}\n").as_bytes());
        }
        let kept = String::from_utf8(tail.take().unwrap()).unwrap();
        assert!(kept.len() <= 100 && kept.ends_with("line 028\nline 029\n"), "{kept}");
        let cut: usize = kept.strip_prefix('[').unwrap().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(cut + kept.split_once('\n').unwrap().1.len(), 30 * 9, "{kept}");
        let none = Tail::new(0);
        none.add(b"secret");
        assert_eq!(none.take(), None);
        let small = Tail::new(10);
        small.add(&[b'x'; 1_000]);
        assert_eq!(small.take().unwrap(), b"[1000 bytes cut off]\n");
    }
}
