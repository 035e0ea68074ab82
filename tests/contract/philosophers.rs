//! The dining philosophers: five processes, one fork between each two neighbours, two forks for
//! each meal.

use std::{collections::HashMap, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb};
use tokio::time::{Instant, sleep};

use crate::waiters::{Process, Turn, now, places};

harness::tests!(everywhere(philosophers_eat_as_they_please), everywhere.each(philosophers_eat_in_order));

const SEATS: usize = 5;
const MEALS: usize = 10;

/// The forks of a philosopher, in the order of keys, which is also the order of a meal's tokens.
fn forks(seat: usize) -> [usize; 2] {
    let next = (seat + 1) % SEATS;
    [seat.min(next), seat.max(next)]
}

async fn philosophers_eat_as_they_please<DB: TestDatabase>(db: TestDb<DB>) {
    let mut table = Vec::new();
    for seat in 0..SEATS {
        let [one, other] = forks(seat);
        table.push(Process::start(&db, seat, "wait", &format!("fork {one},fork {other}")).await);
    }
    let meals = dine(table).await;
    assert_no_fork_is_in_two_hands(&meals);
}

/// A ticket that was seen in the queue is served before every neighbour that asks after that,
/// however slow the machine is. Each meal also acquires a key of its own, which identifies its
/// ticket.
async fn philosophers_eat_in_order<DB: TestDatabase>(db: TestDb<DB>) {
    let mut table = Vec::new();
    for seat in 0..SEATS {
        let [one, other] = forks(seat);
        let keys = format!("fork {one},fork {other},meal {seat}.#");
        table.push(Process::start(&db, seat, "wait in order", &keys).await);
    }
    let all_forks = (0..SEATS).map(|fork| format!("fork {fork}"));
    let all_forks = db.lock().try_acquire_all(all_forks).await.unwrap().acquired().unwrap();
    let dinner = harness::spawn(dine(table));
    let (mut tickets, began) = (HashMap::new(), Instant::now());
    while tickets.len() < SEATS {
        assert!(began.elapsed() < PATIENCE, "all wait: {tickets:?}");
        look(&db, &mut tickets).await;
    }
    all_forks.release().await.unwrap();
    while !dinner.is_finished() {
        look(&db, &mut tickets).await;
    }
    let meals = dinner.await.unwrap();
    assert_no_fork_is_in_two_hands(&meals);
    for (seat, eaten) in meals.iter().enumerate() {
        for (number, meal) in eaten.iter().enumerate() {
            if let Some(tickets_in_queue) = tickets.get(&format!("meal {seat}.{number}")) {
                assert_not_overtaken(&meals, meal, *tickets_in_queue);
            }
        }
    }
    assert_eq!(places(&db).await, 0);
}

/// Records when each ticket was first seen in the queue, under its meal's own key.
async fn look<DB: TestDatabase>(db: &TestDb<DB>, tickets: &mut HashMap<String, Duration>) {
    let list =
        if db.server.name == "postgres" { "string_agg(key_resource, ',')" } else { "group_concat(key_resource)" };
    let waiting = db.cell(list, "t_resource_lock_queue WHERE key_resource LIKE 'meal %'").await.unwrap_or_default();
    let seen = now();
    for meal in waiting.split(',').filter(|meal| !meal.is_empty()) {
        tickets.entry(meal.to_owned()).or_insert(seen);
    }
    sleep(Duration::from_millis(1)).await;
}

/// Runs until every philosopher has eaten all of its meals. Returns the meals by philosopher, in
/// order.
async fn dine(table: Vec<Process>) -> Vec<Vec<Turn>> {
    let seats: Vec<_> = table.into_iter().map(|philosopher| harness::spawn(eat(philosopher))).collect();
    let mut meals = Vec::new();
    for seat in seats {
        meals.push(seat.await.unwrap());
    }
    meals
}

async fn eat(mut philosopher: Process) -> Vec<Turn> {
    let mut meals = Vec::new();
    for _ in 0..MEALS {
        sleep(Duration::from_millis(fastrand::u64(..=5))).await;
        philosopher.ask(Duration::from_millis(5)).await;
        meals.push(philosopher.turn().await);
    }
    philosopher.ended(PATIENCE).await;
    meals
}

/// The meals that used a fork, with the fork's tokens.
fn with_fork(meals: &[Vec<Turn>], fork: usize) -> impl Iterator<Item = (i64, &Turn)> {
    meals.iter().flatten().filter_map(move |meal| Some((token(meal, fork)?, meal)))
}

fn token(meal: &Turn, fork: usize) -> Option<i64> {
    forks(meal.process).iter().position(|other| *other == fork).map(|place| meal.tokens[place])
}

fn assert_no_fork_is_in_two_hands(meals: &[Vec<Turn>]) {
    for fork in 0..SEATS {
        let mut hands: Vec<_> = with_fork(meals, fork).collect();
        hands.sort_unstable_by_key(|(token, _)| *token);
        for pair in hands.windows(2) {
            let ((one, before), (other, after)) = (pair[0], pair[1]);
            assert!(one < other && before.freed <= after.granted, "fork {fork} in two hands: {pair:?}");
        }
    }
}

fn assert_not_overtaken(meals: &[Vec<Turn>], meal: &Turn, tickets_in_queue: Duration) {
    for fork in forks(meal.process) {
        let granted = token(meal, fork).unwrap();
        let late = with_fork(meals, fork).find(|(token, other)| other.called > tickets_in_queue && *token < granted);
        assert!(late.is_none(), "in line at {tickets_in_queue:?}: {meal:?}, overtaken at fork {fork} by {late:?}");
    }
}
