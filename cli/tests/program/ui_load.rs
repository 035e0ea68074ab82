//! What `rowlock ui` costs the database.

use std::time::Duration;

use harness::{DIRECT, TestDatabase, TestDb, eventually};
use tokio::time::Instant;

use crate::ui::open;

harness::tests!(postgres[DIRECT].alone(fifty_open_pages_cost_two_statements_a_second));

const PAGES: usize = 50;
const TIME: Duration = Duration::from_secs(12);

async fn fifty_open_pages_cost_two_statements_a_second<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute(
        "INSERT INTO t_resource_lock (key_resource, client_ip, begin_time) \
         SELECT 'k/' || n, 'me', clock_timestamp() FROM generate_series(1, 100000) n",
    )
    .await;
    let ui = open(&db, "").await;
    let mut pages = Vec::new();
    for number in 0..PAGES {
        let path = match number % 4 {
            0 => format!("/events/?q={number}&sort=since"),
            1 => format!("/events/key?key=k/{number}"),
            2 => "/events/jobs?".to_owned(),
            _ => format!("/events/runs?window=7d&page={number}"),
        };
        let mut events = ui.events(&path).await;
        events.next().await;
        pages.push(events);
    }
    let (before, began) = (DB::statements(&db.pool).await.unwrap(), Instant::now());
    // Each page is sent what is new, and each is read.
    let reading: Vec<_> = pages
        .into_iter()
        .map(|mut page| {
            tokio::spawn(async move {
                page.next().await;
                page.drain(TIME).await;
                page
            })
        })
        .collect();
    let mut open_still = Vec::new();
    for page in reading {
        open_still.push(page.await.unwrap());
    }
    let (statements, seconds) = (DB::statements(&db.pool).await.unwrap() - before, began.elapsed().as_secs_f64());
    // A look that was begun before the count has up to four of its statements within it.
    let most = 2.0 * seconds + 4.0;
    assert!((4..most as i64).contains(&statements), "{statements} statements in {seconds} s, with {PAGES} pages");
    drop(open_still);
    // The last look may still be read.
    eventually("no page is open, and nothing is asked for five seconds", async || {
        let before = DB::statements(&db.pool).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        DB::statements(&db.pool).await.unwrap() == before
    })
    .await;
}
