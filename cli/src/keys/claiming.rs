//! A claim that a command of the program makes: the wait for it, and its end.

use std::{fmt, time::Duration};

use rowlock::{
    Database, Error, Key, Lease, LeaseLock, Status,
    admin::{ListOptions, LockInfo, LockState},
};

use crate::{
    args::claims::{RuleSet, Terms},
    exit::Failure,
    keys::waiting::show_during,
    out,
    process::signals::{StopSignals, exit_code},
};

/// How long the database has to end a claim under which no command runs.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The most readers of a name at a time, so that one page has them all.
const MAX_READERS: u32 = 1024;

/// A claim on some keys, with what its wait and its end need.
pub struct Claiming<'a, DB: Database> {
    pub lock: &'a LeaseLock<DB>,
    /// Messages name the first.
    pub keys: Vec<&'a str>,
    /// How long the database has to end the claim, or to undo a request.
    pub stop_timeout: Duration,
    pub rules: RuleSet,
    /// The exit code of a refusal.
    pub refused: u8,
}

impl<'a, DB: Database> Claiming<'a, DB> {
    /// Returns a claim under which no command runs.
    pub fn without_command(lock: &'a LeaseLock<DB>, key: &'a str, terms: &Terms) -> Self {
        Self { lock, keys: vec![key], stop_timeout: STOP_TIMEOUT, rules: terms.rules, refused: terms.refused_exit_code }
    }

    pub fn key(&self) -> &'a str {
        self.keys.first().copied().unwrap_or_default()
    }

    /// Waits for a request, which a signal ends. A claim that is in flight then is undone.
    pub async fn wait_for<G>(
        &self,
        request: impl Future<Output = Result<G, Error>>,
        stop: &mut StopSignals,
    ) -> Result<G, Failure> {
        let granted = tokio::select! {
            granted = show_during(self.lock, &self.keys, request) => granted,
            signal = stop.next() => {
                self.settle(stop).await;
                return Err(Failure::silent(exit_code(signal)));
            }
        };
        let error = match granted {
            Ok(granted) => return Ok(granted),
            Err(error) => error,
        };
        // A claim that is being undone would otherwise keep its key until its lease ends.
        self.settle(stop).await;
        let Error::Refused(refusal) = error else { return Err(error.into()) };
        out::print_refusal(refusal, self.refused);
        Err(Failure::silent(self.refused))
    }

    /// Waits until requests that are under way are undone.
    pub async fn settle(&self, stop: &mut StopSignals) {
        let _ = stop.within(self.stop_timeout, self.lock.shutdown(Duration::MAX)).await;
    }

    /// Returns a plain claim on names none of which has a reader. The claim keeps new readers out.
    /// While one is in, it is refused, and put back.
    pub async fn beside_no_reader<K>(
        &self,
        lease: Lease<DB, K>,
        stop: &mut StopSignals,
    ) -> Result<Lease<DB, K>, Failure> {
        let alone = tokio::select! {
            alone = self.refuse_beside_readers() => alone,
            signal = stop.next() => Err(Failure::silent(exit_code(signal))),
        };
        match alone {
            Ok(()) => Ok(lease),
            Err(failure) => Err(self.put_back(lease, stop, failure).await),
        }
    }

    async fn refuse_beside_readers(&self) -> Result<(), Failure> {
        for name in &self.keys {
            let prefix = format!("{name}#r");
            let readers = ListOptions::default().claimed().prefix(&prefix).limit(MAX_READERS);
            let lock = self.lock.read_write(name);
            let is_reader = |key: &str| Key::new(key).is_ok_and(|key| lock.readers().number(&key).is_some());
            let is_in = |row: &LockInfo| row.state == LockState::Held && is_reader(&row.key);
            if let Some(reader) = self.lock.list(&readers).await?.into_iter().find(is_in) {
                let why = format!("{name} is read by {}: `rowlock run --exclusive` waits for readers", reader.by);
                out::print_refusal(why, self.refused);
                return Err(Failure::silent(self.refused));
            }
        }
        Ok(())
    }

    /// Records how the work has ended. A claim that was lost is an error; whatever else goes wrong
    /// is only told, since the work has ended. The next claim waits for the end of the lease at
    /// most.
    pub async fn record<K>(&self, lease: Lease<DB, K>, status: Status, stop: &mut StopSignals) -> Result<(), Failure> {
        match stop.within(self.stop_timeout, lease.end(status)).await {
            Ok(Ok(())) => {}
            Ok(Err(error @ Error::Lost { .. })) => return Err(error.into()),
            Ok(Err(error)) => self.print_not_recorded(format_args!("{error:?}")),
            Err(why) => self.print_not_recorded(why),
        }
        Ok(())
    }

    /// Abandons the claim of a command that was asked to stop. Another instance may run the command
    /// at once.
    pub async fn abandon<K>(&self, lease: Lease<DB, K>, stop: &mut StopSignals) {
        if let Err(why) = stop.within(self.stop_timeout, self.abandon_and_settle(lease)).await {
            self.print_not_recorded(why);
        }
    }

    /// Ends a claim under which no work was begun. Under the article's rules it is released as
    /// succeeded, since they refuse every claim after an apparent crash.
    pub async fn put_back<K>(&self, lease: Lease<DB, K>, stop: &mut StopSignals, failure: Failure) -> Failure {
        let put_back = async {
            match self.rules {
                RuleSet::Recover => self.abandon_and_settle(lease).await,
                RuleSet::Article => {
                    drop(lease.release().await);
                    self.lock.shutdown(Duration::MAX).await;
                }
            }
        };
        if let Err(why) = stop.within(self.stop_timeout, put_back).await {
            self.print_not_recorded(why);
        }
        failure
    }

    /// Abandons the claim, so that no lock-delay is kept, and waits until that is settled.
    async fn abandon_and_settle<K>(&self, lease: Lease<DB, K>) {
        drop(lease.abandon().await); // an outcome that is unknown ends with the lease
        self.lock.shutdown(Duration::MAX).await;
    }

    fn print_not_recorded(&self, why: impl fmt::Display) {
        let key = self.key();
        let next = match self.rules {
            RuleSet::Recover => "it is free when its lease ends",
            RuleSet::Article => {
                "`rowlock list --claimed` shows what stays closed, and `rowlock release --force --status S` frees it"
            }
        };
        out::print_error(format_args!("{key}: its end was not recorded: {why}; {next}"));
    }
}
