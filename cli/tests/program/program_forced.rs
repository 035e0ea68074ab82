//! `rowlock release --force`: what it says, and what it leaves behind.

use harness::{TestDatabase, TestDb, acquired};

use crate::{program::Program as _, program_schedules::due};

harness::tests!(everywhere(a_forced_release_says_from_whom_the_key_was_taken, a_schedule_is_not_released_by_force));

async fn a_forced_release_says_from_whom_the_key_was_taken<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("node-1").build().unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    let forced = db.by_ann("release k --force", &[]).await.with(0);
    let event = r#"changed on the command line change="release" of="k" by="ann" from="#;
    assert!(forced.err.contains("WARN") && forced.err.contains(event), "{forced:?}");
    assert!(forced.err.contains("held by node-1") && forced.err.lines().count() == 1, "{forced:?}");
    let (said, token) = (forced.out, db.show("k").await["token"].clone());
    let begin = format!("k is free; its token is {token}; it was held by node-1 since 2");
    let claim = format!(
        " under token {}, holder {}; under the rules of the article it stays closed until `--status S`\n",
        lease.token(),
        lease.claim().holder
    );
    assert!(said.starts_with(&begin) && said.ends_with(&claim), "{said}");

    acquired(lock.try_acquire("k").await).fail().await.unwrap();
    let said = db.rowlock("release k --force", &[]).await.with(0).out;
    assert!(said.contains("; it was failed, last taken by node-1 since 2") && !said.contains("holder"), "{said}");
}

async fn a_schedule_is_not_released_by_force<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let said = db.rowlock("release k --force", &[]).await.with(75);
    let says =
        "\"k\" is no key, but a schedule: `rowlock pause k` lets no run begin, and `rowlock trigger k` asks for one";
    assert!(said.out.is_empty() && said.err.contains(says), "{said:?}");
    let absent = db.rowlock("release absent --force", &[]).await.with(75);
    assert!(absent.err.contains("\"absent\" has no row") && absent.err.lines().count() == 1, "{absent:?}");
    let told = db.by_ann("--log-level debug release absent --force", &[]).await.with(75);
    let event = r#"not changed on the command line change="release" of="absent" by="ann" from="#;
    assert!(told.err.contains(event), "{told:?}");
}
