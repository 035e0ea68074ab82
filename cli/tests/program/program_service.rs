//! `cron` as a service: what a service manager hears.

use harness::{PATIENCE, TestDatabase, TestDb};
use rustix::process::Signal;
use tokio::{net::UnixDatagram, time::timeout};

use crate::{
    program::{Program as _, STAYS, Stage, Started, start},
    program_cron::job,
};

harness::tests!(sqlite(a_service_manager_hears_of_the_program));

struct Manager {
    socket: UnixDatagram,
    stage: Stage,
}

impl Manager {
    fn new() -> Self {
        let stage = Stage::new();
        Self { socket: UnixDatagram::bind(stage.file("notify")).unwrap(), stage }
    }

    fn start<DB: TestDatabase>(&self, db: &TestDb<DB>, script: &str) -> Started {
        let path = job(&self.stage, "k", "after = \"1h\"", script);
        let mut command = db.command("cron --drain 1h", &[path.to_str().unwrap()]);
        command.env("NOTIFY_SOCKET", self.stage.file("notify")).env("WATCHDOG_USEC", "600000");
        start(command)
    }

    /// Waits for a word that contains this text.
    async fn hears(&self, text: &str) {
        let word = async {
            let mut word = [0; 4096];
            loop {
                let length = self.socket.recv(&mut word).await.unwrap();
                if String::from_utf8_lossy(&word[..length]).contains(text) {
                    return;
                }
            }
        };
        timeout(PATIENCE, word).await.unwrap_or_else(|_| panic!("no {text:?}"));
    }
}

async fn a_service_manager_hears_of_the_program<DB: TestDatabase>(db: TestDb<DB>) {
    let manager = Manager::new();
    let script = format!("echo ${{NOTIFY_SOCKET-none}} ${{WATCHDOG_USEC-none}}; {STAYS}");
    let mut running = manager.start(&db, &script);
    manager.hears("READY=1\nSTATUS=it waits for the database").await;
    manager.hears("jobs.toml: 1 job").await;
    running.says("k: none none\n", 1).await;
    for _ in 0..3 {
        manager.hears("WATCHDOG=1").await;
    }
    manager.stage.up().await;
    running.signal(Signal::TERM);
    manager.hears("STOPPING=1\nSTATUS=it waits for its commands\nEXTEND_TIMEOUT_USEC=").await;
    for _ in 0..2 {
        manager.hears("WATCHDOG=1").await;
        manager.hears("EXTEND_TIMEOUT_USEC=").await;
    }
    manager.stage.go();
    running.ended().await.with(0);
}
