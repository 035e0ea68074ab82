use chrono::{DateTime, Utc};

use super::*;

fn at(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

#[test]
fn what_is_wrong_is_said_where_it_is_set() {
    let schedule = || Schedule::cron("k", "30 2 * * *");
    let year = 400 * DAY;
    for (wrong, says) in [
        (Schedule::cron("k", "61 * * * *"), "the cron pattern \"61 * * * *\": the minute \"61\": 61 is not one of"),
        (Schedule::cron(" k", "0 0 * * *"), "white space"),
        (schedule().zone("Europe/Berlitz"), "\"Europe/Berlitz\" is no time zone"),
        (Schedule::every("k", DAY).zone("UTC"), "only a cron pattern has a time zone"),
        (Schedule::every("k", Duration::from_millis(99)), "a period of 99ms is not possible"),
        (Schedule::every("k", Duration::from_micros(100_500)), "whole milliseconds"),
        (Schedule::after("k", year), "a delay of"),
        (schedule().catch_up(CatchUp::All(0)), "from 1 to 1,000"),
        (schedule().catch_up(CatchUp::All(1_001)), "from 1 to 1,000"),
        (schedule().grace(year), "a grace of"),
        (schedule().timeout(year), "a timeout of"),
        (schedule().timeout(Duration::ZERO), "from 1 ms"),
        (schedule().exclusive_with(" k"), "white space"),
        (schedule().retry(1_001, DAY), "at most 1,000"),
        (schedule().retry(1, DAY..DAY / 2), "the longest pause before a retry, 43200s, is below the first, 86400s"),
        (schedule().retry(1, 400 * DAY..=YEAR), "a pause before a retry of 34560000s is not possible"),
        (schedule().lease(Duration::ZERO), "a lease of 0s is not possible"),
    ] {
        let fault = wrong.check().unwrap_err();
        assert!(fault.faults().count() == 1 && fault.to_string().contains(says), "{fault}: {says}");
        assert!(wrong.upcoming(at("2026-01-01T00:00:00Z")).is_err(), "{says}");
    }
    let all = Schedule::cron(" k", "61 * * * *").zone("Berlitz").grace(year);
    assert_eq!(all.check().unwrap_err().faults().count(), 4);
}

#[test]
fn the_row_keeps_the_times_in_one_form() {
    let cron = Schedule::cron("k", " 30  2 * * * ");
    assert_eq!((cron.text.as_str(), cron.zone.name()), ("cron 30 2 * * *", "UTC"));
    assert_eq!(cron.zone("Europe/Berlin").zone.name(), "Europe/Berlin");
    assert_eq!(Schedule::every("k", DAY).text, "every 86400s");
    assert_eq!(Schedule::after("k", LEAST).text, "after 100ms");
}

#[test]
fn ticks_ahead_are_those_that_follow_one_another() {
    let ticks = |schedule: &Schedule, after: &str| {
        schedule.upcoming(at(after)).unwrap().take(3).map(|tick| tick.format("%F %R").to_string()).collect::<Vec<_>>()
    };
    let cron = Schedule::cron("k", "0 9 * * MON-FRI").zone("Africa/Casablanca");
    assert_eq!(ticks(&cron, "2026-11-27T09:00:00Z"), ["2026-11-30 09:00", "2026-12-01 09:00", "2026-12-02 09:00"]);
    let every = Schedule::every("k", 2 * DAY);
    assert_eq!(ticks(&every, "1970-01-01T00:00:00Z"), ["1970-01-03 00:00", "1970-01-05 00:00", "1970-01-07 00:00"]);
    let daily = Schedule::every("k", DAY);
    assert_eq!(ticks(&daily, "9998-12-30T00:00:00Z").len(), 1, "they end with what the databases hold");
    assert_eq!(ticks(&Schedule::after("k", DAY), "2026-01-01T00:00:00Z").len(), 0);
    for schedule in [&Schedule::after("k", DAY), &every, &cron, &Schedule::cron("k", "0 9 * * *").jitter(DAY)] {
        assert_eq!(schedule.upcoming(DateTime::<Utc>::MAX_UTC).unwrap().next(), None, "{schedule:?}");
        assert!(
            schedule
                .upcoming(DateTime::<Utc>::MIN_UTC)
                .is_ok_and(|mut ticks| ticks.next() < Some(at("2026-01-01T00:00:00Z")))
        );
    }
    let berlin = Schedule::cron("k", "30 2 * * *").zone("Europe/Berlin");
    assert_eq!(berlin.in_zone(at("2026-07-01T00:30:00Z")).to_rfc3339(), "2026-07-01T02:30:00+02:00");
    assert_eq!(every.in_zone(at("2026-07-01T00:30:00Z")).to_rfc3339(), "2026-07-01T00:30:00+00:00");
}

#[test]
fn a_fixed_rate_has_one_grid_and_a_fixed_delay_none() {
    let every = Schedule::every("k", Duration::from_secs(30));
    for (after, slot) in [
        ("2026-01-01T10:00:00Z", "2026-01-01T10:00:30Z"),
        ("2026-01-01T10:00:29.999999Z", "2026-01-01T10:00:30Z"),
        ("1969-12-31T23:59:50Z", "1970-01-01T00:00:00Z"),
    ] {
        assert_eq!(every.next(at(after)), at(slot));
    }
    let after = Schedule::after("k", Duration::from_secs(30));
    assert_eq!(after.first(at("2026-01-01T10:00:00.123456Z")), at("2026-01-01T10:00:00.123Z"));
    assert_eq!(after.next(at("2026-01-01T10:00:00.123456Z")), at("2026-01-01T10:00:30.123Z"));
}

#[test]
fn pauses_double_up_to_the_longest() {
    let second = Duration::from_secs(1);
    let retries = Retries::new(9, (second..5 * second).into()).unwrap();
    let pauses = [1, 2, 3, 4, 99, u32::MAX].map(|attempt| retries.pause(attempt).num_seconds());
    assert_eq!(pauses, [1, 2, 4, 5, 5, 5]);
    assert_eq!(Retries::new(9, (second..=5 * second).into()), Ok(retries));
    assert_eq!(Retries::new(9, second.into()).unwrap().pause(3), TimeDelta::seconds(1));
    assert_eq!(Retries::new(9, Duration::ZERO.into()).unwrap().pause(3), TimeDelta::zero());
}

#[test]
fn a_jitter_shifts_all_ticks_by_one_part_and_is_read_again() {
    let plain = |name: &str| Schedule::cron(name, "30 2 * * *").zone("Europe/Berlin");
    let most = Duration::from_secs(600);
    let after: DateTime<Utc> = "2026-03-27T12:00:00Z".parse().unwrap();
    let mut parts = std::collections::HashSet::new();
    for number in 0..50 {
        let name = format!("job {number}");
        let (plain, shifted) = (plain(&name), plain(&name).jitter(most).jitter(most));
        let part = shifted.upcoming(after).unwrap().next().unwrap() - plain.upcoming(after).unwrap().next().unwrap();
        assert!(part >= TimeDelta::zero() && part.to_std().unwrap() <= most && part.subsec_nanos() == 0, "{part}");
        // Over the change of the clock, and seen from within the part.
        let all = plain.upcoming(after).unwrap().take(5).map(|tick| tick + part);
        assert!(shifted.upcoming(after).unwrap().take(5).eq(all), "{part}");
        let tick = shifted.upcoming(after).unwrap().next().unwrap();
        assert_eq!(shifted.upcoming(tick - TimeDelta::seconds(1)).unwrap().next(), Some(tick));
        let read = Schedule::of(&shifted.times()).unwrap();
        assert_eq!((read.times(), read.upcoming(after).unwrap().next()), (shifted.times(), Some(tick)));
        parts.insert(part);
    }
    assert!(parts.len() > 40, "{parts:?}");
    let every = Schedule::every("k", Duration::from_secs(60)).jitter(Duration::from_secs(30));
    assert!(every.times().spec.starts_with("every 60s +"), "{every:?}");
    for wrong in [Duration::from_millis(999), DAY + Duration::from_secs(1)] {
        assert!(plain("k").jitter(wrong).check().is_err());
    }
    assert!(Schedule::after("k", DAY).jitter(most).check().is_err());
}
