//! `rowlock lead` and `rowlock leader`: a command that runs on one instance, and which one that is.

use std::time::Duration;

use rowlock::{Database, LeaseLock};
use rustix::process::Pid;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    args::claims::{Lead, Leader, RuleSet},
    exit::{self, Failure},
    format::{clock_or_dash, precise},
    keys::{
        claiming::Claiming,
        run::{Job, LOST, environment},
    },
    out::{self, printable},
    process::{
        find::find,
        signals::{StopSignals, exit_code},
    },
};

/// The pause between a loss and the next campaign.
const PAUSE: Duration = Duration::from_secs(1);

/// Campaigns, runs the command while it leads, and campaigns again after a loss.
pub async fn lead<DB: Database>(lock: LeaseLock<DB>, lead: Lead, front: Option<Pid>) -> Result<u8, Failure> {
    let program = find(&lead.command)?;
    let mut stop = StopSignals::listen()?;
    let (key, stop_timeout, lock_delay) = (lead.key.as_str(), lead.stop_timeout, lead.lock_delay());
    let (rules, refused) = (RuleSet::Recover, exit::REFUSED);
    let claiming = Claiming { lock: &lock, keys: vec![key], stop_timeout, rules, refused };
    let job = Job { claiming: &claiming, program, words: &lead.command, front, timeout: None, lock_delay };
    let election = lock.election(key);
    loop {
        let lease = claiming.wait_for(election.campaign(), &mut stop).await?.into_lease();
        // The process may have been suspended since the grant.
        if !lease.is_held() {
            continue;
        }
        match job.supervise(&environment(lease.claim()), lease, &mut stop).await? {
            (_, LOST) if stop.asked().is_none() => {
                out::print_warning(format_args!("{key}: campaigning again"));
                let _ = timeout(PAUSE, stop.next()).await;
            }
            (_, LOST) => {}
            (code, _) => return Ok(code),
        }
        if let Some(signal) = stop.asked() {
            return Ok(exit_code(signal));
        }
    }
}

/// Prints the leader, and with `--watch` each one that follows.
pub async fn leader<DB: Database>(lock: &LeaseLock<DB>, shown: &Leader) -> Result<u8, Failure> {
    let mut leaders = lock.election(shown.key.as_str()).observe();
    loop {
        let leader = leaders.next().await?;
        let key = shown.key.as_str();
        match &leader {
            leader if shown.json => out::say_json(&json!({
                "key": key,
                "term": leader.as_ref().map(|leader| leader.term.get()),
                "by": leader.as_ref().map(|leader| &leader.label),
                "since": leader.as_ref().and_then(|leader| leader.since).map(precise),
                "until": leader.as_ref().and_then(|leader| leader.until).map(precise),
            }))?,
            Some(leader) => {
                let (key, by) = (printable(key), printable(&leader.label));
                let since = clock_or_dash(leader.since);
                out::say(format_args!("{key}: {by} leads since {since}, in term {}", leader.term))?
            }
            None => out::say(format_args!("{}: no instance leads", printable(key)))?,
        };
        if !shown.watch {
            return Ok(if leader.is_some() { exit::OK } else { exit::REFUSED });
        }
    }
}
