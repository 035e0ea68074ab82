//! How a worker asks for a lease: on a key, on a permit, or as a reader or the writer.

use std::time::Duration;

use harness::TestDatabase;
use rowlock::{Error, Lease, LeaseLock};

use crate::{record::Kind, used::Used, worker::WAIT};

/// What to ask for, and whether to wait for it.
#[derive(Clone, Copy)]
pub struct Asking {
    used: Used,
    waits: bool,
    writes: bool,
}

impl Asking {
    pub fn any(used: Used, random: &mut fastrand::Rng) -> Self {
        Self { used, waits: random.u8(..4) > 0, writes: random.u8(..10) < 3 }
    }

    pub fn kind(self) -> Kind {
        match self.used {
            _ if !self.waits => Kind::Try,
            Used::ReadWrite if self.writes => Kind::Write,
            Used::ReadWrite => Kind::Read,
            _ => Kind::Lease,
        }
    }

    pub async fn on<DB: TestDatabase>(self, lock: &LeaseLock<DB>, key: &str) -> Result<Lease<DB>, Error> {
        let wait = if self.waits { WAIT } else { Duration::ZERO };
        match self.used {
            Used::Permits => {
                let most = u32::try_from(self.used.promised().most).unwrap();
                lock.semaphore(key, most).acquire(wait).await
            }
            Used::ReadWrite if self.writes => lock.read_write(key).writer().acquire(wait).await,
            Used::ReadWrite => lock.read_write(key).readers().acquire(wait).await,
            _ => lock.acquire(key, wait).await,
        }
    }
}
