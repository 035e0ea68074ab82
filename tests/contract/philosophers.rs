//! The dining philosophers: five processes around a table, a fork between each two, two forks for each meal.

use std::time::Duration;

use crate::{
    bed::{Bed, PATIENCE, Site},
    waiters::{Process, places, seconds},
};

const SEATS: usize = 5;

pub async fn philosophers_eat_as_they_please<DB: Bed>(site: Site<DB>) {
    dine(&site, "wait", seconds(), 1).await;
}

pub async fn philosophers_eat_in_order<DB: Bed>(site: Site<DB>) {
    let eaten = dine(&site, "wait in order", 2 * seconds(), 6).await;
    let (least, most) = (eaten.iter().min().unwrap(), eaten.iter().max().unwrap());
    assert!(most - least <= 2.max(most / 10), "{eaten:?}");
}

/// Nobody dies of hunger, each has `least` meals, and no fork is in two hands. How many meals each had.
async fn dine<DB: Bed>(site: &Site<DB>, job: &str, time: Duration, least: usize) -> [usize; SEATS] {
    let forks = |seat: usize| [seat.min((seat + 1) % SEATS), seat.max((seat + 1) % SEATS)];
    let mut table = Vec::new();
    for seat in 0..SEATS {
        let [one, other] = forks(seat);
        table.push(Process::start(site, seat, job, &format!("fork {one},fork {other}")).await);
    }
    for philosopher in &mut table {
        philosopher.go_on(time, Duration::from_millis(5), Duration::from_millis(5)).await;
    }
    let mut meals = Vec::new();
    for philosopher in table {
        meals.extend(philosopher.ended(time + PATIENCE).await);
    }
    for fork in 0..SEATS {
        let with = |meal: &crate::waiters::Turn| {
            let place = forks(meal.process).iter().position(|other| *other == fork)?;
            Some((meal.tokens[place], meal.granted, meal.freed))
        };
        let mut hands: Vec<_> = meals.iter().filter_map(with).collect();
        hands.sort_unstable();
        for pair in hands.windows(2) {
            assert!(pair[0].0 < pair[1].0 && pair[0].2 <= pair[1].1, "fork {fork} in two hands: {pair:?}");
        }
    }
    let eaten = [0, 1, 2, 3, 4].map(|seat| meals.iter().filter(|meal| meal.process == seat).count());
    let longest = meals.iter().map(crate::waiters::Turn::waited).max().unwrap();
    println!("{}, {job}: meals {eaten:?} in {time:?}, the longest hunger {longest:?}", site.server.name);
    assert!(eaten.iter().all(|meals| *meals >= least), "{eaten:?}");
    assert_eq!(places(site).await, 0);
    eaten
}
