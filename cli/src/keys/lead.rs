//! `rowlock lead` and `rowlock leader`: a command that runs on one instance, and which one that is.

use std::time::Duration;

use rowlock::{Database, LeaseLock};
use rustix::process::Pid;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    args::{
        claims::{Lead, Leader, RuleSet},
        process::Beginning,
    },
    exit::{self, Failure},
    format::{clock, precise},
    keys::{
        run::{Job, Outcome, environment},
        waiting::Wait,
    },
    out::{self, printable},
    process::{
        find::find,
        signals::{StopSignals, number},
        work::Work,
    },
};

/// The pause between a loss and the next campaign.
const PAUSE: Duration = Duration::from_secs(1);

/// Campaigns, runs the command while it leads, and campaigns again after a loss.
pub async fn lead<DB: Database>(lock: LeaseLock<DB>, lead: Lead, front: Option<Pid>) -> Result<u8, Failure> {
    let program = find(&lead.command)?;
    let mut stop = StopSignals::listen()?;
    let lock_delay = lead.lock_delay.unwrap_or(lead.grace);
    let job = Job { key: lead.key.as_str(), grace: lead.grace, timeout: None, lock_delay, rules: RuleSet::Recover };
    let election = lock.election(job.key);
    let wait = Wait { keys: vec![job.key], grace: lead.grace, refused: exit::REFUSED };
    loop {
        let leadership = tokio::select! {
            biased;
            signal = async { if let Some(signal) = stop.asked() { signal } else { stop.next().await } } => {
                let _ = stop.within(lead.grace, lock.shutdown(Duration::MAX)).await;
                return Ok(exit::SIGNAL + number(signal));
            }
            leadership = wait.show_during(&lock, election.campaign()) => leadership?,
        };
        let lease = leadership.into_lease();
        // The process may have been suspended since the grant.
        if !lease.is_held() {
            continue;
        }
        let work = match Work::start(
            program.clone(),
            &lead.command,
            &environment(lease.claim()),
            &Beginning::default(),
            front,
        ) {
            Ok(work) => work,
            Err(failure) => return Err(job.put_back(&lock, lease, &mut stop, failure).await),
        };
        match job.supervise(&lock, lease, work, &mut stop).await? {
            (_, Outcome::Lost) if stop.asked().is_none() => {
                out::print_error(format_args!("{}: campaigning again", job.key));
                let _ = timeout(PAUSE, stop.next()).await;
            }
            (_, Outcome::Lost) => {}
            (code, _) => return Ok(code),
        }
    }
}

/// Prints the leader, and with `--watch` each one that follows.
pub async fn leader<DB: Database>(lock: &LeaseLock<DB>, shown: &Leader) -> Result<u8, Failure> {
    let mut leaders = lock.election(shown.key.as_str()).observe();
    loop {
        let leader = leaders.next().await?;
        if shown.json {
            out::say_json(&json!({
                "key": shown.key.as_str(),
                "term": leader.as_ref().map(|leader| leader.term.get()),
                "by": leader.as_ref().map(|leader| &leader.label),
                "since": leader.as_ref().and_then(|leader| leader.since).map(precise),
                "until": leader.as_ref().and_then(|leader| leader.until).map(precise),
            }))?;
        } else {
            let key = printable(shown.key.as_str());
            match &leader {
                Some(leader) => {
                    let since = leader.since.map_or_else(|| "-".into(), clock);
                    out::say(format_args!(
                        "{key}: {} leads since {since}, in term {}",
                        printable(&leader.label),
                        leader.term
                    ))?;
                }
                None => out::say(format_args!("{key}: no instance leads"))?,
            }
        }
        if !shown.watch {
            return Ok(if leader.is_some() { exit::OK } else { exit::REFUSED });
        }
    }
}
