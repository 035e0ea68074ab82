//! The code's own constants, read from its text where they are private to a file that sends or
//! waits. A constant that is renamed or written in another form fails the simulation.

use std::time::Duration;

use crate::events::{Time, micros};

/// Returns the text between this beginning and the next `;` or `,`.
fn text<'a>(source: &'a str, before: &str) -> &'a str {
    let (_, after) = source.split_once(before).unwrap_or_else(|| panic!("the code has no longer: {before}"));
    after.split([';', ',']).next().unwrap()
}

fn number(source: &str, before: &str) -> usize {
    text(source, before).replace('_', "").parse().unwrap()
}

fn duration(source: &str, before: &str) -> Time {
    let text = text(source, before);
    let number = |unit: &str| text.strip_prefix(unit)?.strip_suffix(')')?.parse().ok();
    let found = number("Duration::from_millis(").map(Duration::from_millis);
    micros(found.or_else(|| number("Duration::from_secs(").map(Duration::from_secs)).unwrap())
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $kind:ident = $file:literal, $before:literal;)*) => {
        /// The constants, each read once.
        #[derive(Clone, Copy, Debug)]
        pub struct Constants {
            $($(#[$doc])* pub $name: constants!(@type $kind),)*
        }

        impl Constants {
            pub fn read() -> Self {
                Self { $($name: $kind(include_str!(concat!("../../src/", $file)), $before),)* }
            }
        }
    };
    (@type number) => { usize };
    (@type duration) => { Time };
}

constants! {
    /// The most connections of an instance for requests.
    requests: number = "session/sessions.rs", "const MAX_REQUESTS: usize = ";
    renewals: number = "session/sessions.rs", "const MAX_RENEWALS: usize = ";
    /// The most claims in one statement.
    batch: number = "session/queue.rs", "const MAX_REQUESTS: usize = ";
    /// The most renewals in one statement.
    renewed: number = "store/claim.rs", "pub const BATCH: usize = ";
    /// After how long without a reply another worker sends what waits.
    queue_delay: duration = "session/queue.rs", "const SLOW: Duration = ";
    /// How long one statement may take.
    time_limit: duration = "retry.rs", "const TIME_LIMIT: Duration = ";
    /// For how long a first attempt tries again while another transaction has the row locked.
    busy: duration = "lease/attempt.rs", "const BUSY_TIMEOUT: Duration = ";
    /// How long the connection that listens may take to open.
    listen: duration = "queue/listener.rs", "const LIMIT: Duration = ";
    /// How many seconds a ticket lives without a heartbeat.
    alive: number = "store/queue.rs", "pub const ALIVE_SECONDS: u64 = ";
    /// How many tickets of a queue are read.
    front: number = "store/queue.rs", "pub const FRONT: u64 = ";
}
