//! Wrong passwords: they take time, and are logged.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, header};
use tokio::time::sleep;

use crate::ui::passwords::Passwords;

/// How long a wrong password keeps others from the same address waiting.
const PAUSE: Duration = Duration::from_millis(500);
/// The pause between two lines of the log.
const QUIET: Duration = Duration::from_secs(60);

/// The passwords that are looked at, one at a time from each address, over all its connections.
#[derive(Debug, Default)]
pub struct Guesses {
    turns: Mutex<HashMap<IpAddr, Turn>>,
    told: Mutex<Told>,
}

type Turn = Arc<tokio::sync::Mutex<()>>;

/// The wrong passwords since the last line of the log.
#[derive(Debug, Default)]
struct Told {
    at: Option<Instant>,
    since: u64,
}

impl Guesses {
    /// Returns the name that a request proves.
    pub async fn name(&self, passwords: Option<&Passwords>, headers: &HeaderMap, from: SocketAddr) -> Option<String> {
        // A browser asks its user after the first answer.
        headers.get(header::AUTHORIZATION)?;
        let network = network(from.ip());
        let turn = self.turns.lock().unwrap_or_else(PoisonError::into_inner).entry(network).or_default().clone();
        let name = {
            let _turn = turn.lock().await;
            let name = passwords.and_then(|passwords| passwords.name(headers));
            if name.is_none() {
                self.tell(from);
                sleep(PAUSE).await;
            }
            name
        };
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        drop(turn);
        // An address without a request that waits has no entry.
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        name
    }

    fn tell(&self, from: SocketAddr) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.since += 1;
        if told.at.is_none_or(|at| at.elapsed() >= QUIET) {
            tracing::warn!(%from, since_the_last_line = told.since, "a wrong name or password");
            *told = Told { at: Some(Instant::now()), since: 0 };
        }
    }
}

/// A client that has one IPv6 address has the /64 network of it.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_stands_for_its_network() {
        let of = |text: &str| network(text.parse().unwrap()).to_string();
        assert_eq!(
            [of("10.1.2.3"), of("::ffff:10.1.2.3"), of("2001:db8::1:2:3")],
            ["10.1.2.3", "10.1.2.3", "2001:db8::"]
        );
    }
}
