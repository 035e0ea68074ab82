//! Random patterns against an oracle that looks at each minute, and texts that are refused.

use super::*;

fn at(text: &str) -> NaiveDateTime {
    text.parse().unwrap()
}

/// An item of a field's list, as the oracle reads it.
#[derive(Clone, Copy, Debug)]
enum Item {
    /// From the first to the second number, at each multiple of the third from the first.
    Every(u32, u32, u32),
    LastDay,
    Nearest(u32),
    Week(u32, u32),
    LastWeek(u32),
}

/// A random field: its text and its items.
fn field(random: &mut fastrand::Rng, first: u32, last: u32) -> (String, Vec<Item>) {
    let items = (0..if random.u8(..4) == 0 { random.usize(2..4) } else { 1 }).map(|_| item(random, first, last));
    let (texts, items): (Vec<_>, Vec<_>) = items.unzip();
    (texts.join(","), items)
}

fn item(random: &mut fastrand::Rng, first: u32, last: u32) -> (String, Item) {
    let (low, high) = (random.u32(first..=last), random.u32(first..=last));
    let (low, high) = (low.min(high), low.max(high));
    let step = |random: &mut fastrand::Rng, low: u32, high: u32| random.u32(1..=(high - low).max(1));
    match random.u8(..7) {
        0 | 1 => ("*".to_owned(), Item::Every(first, last, 1)),
        2 => {
            let step = step(random, first, last);
            (format!("*/{step}"), Item::Every(first, last, step))
        }
        3 if last == 31 => {
            [("L".to_owned(), Item::LastDay), (format!("{low}W"), Item::Nearest(low))][random.usize(..2)].clone()
        }
        3 if last == 7 => {
            let (week, name) = (random.u32(1..=5), WEEKDAY.names[low as usize % 7]);
            let [number, named] = [format!("{low}#{week}"), format!("{name}#{week}")];
            let [last, behind] = [format!("{name}#L"), format!("{low}L")];
            let (week, last_week) = (Item::Week(low, week), Item::LastWeek(low));
            [(number, week), (named, week), (last, last_week), (behind, last_week)][random.usize(..4)].clone()
        }
        3 if last == 12 => (MONTH.names[low as usize - 1].to_owned(), Item::Every(low, low, 1)),
        3 | 4 => (low.to_string(), Item::Every(low, low, 1)),
        5 => {
            let step = step(random, low, high);
            (format!("{low}-{high}/{step}"), Item::Every(low, high, step))
        }
        _ => (format!("{low}-{high}"), Item::Every(low, high, 1)),
    }
}

/// Whether an item matches one of the numbers that a field has at a date.
fn matches(item: Item, numbers: &[u32], date: NaiveDate) -> bool {
    let days = |days| date + TimeDelta::days(days);
    match item {
        Item::Every(low, high, step) => {
            numbers.iter().any(|number| (low..=high).contains(number) && (number - low).is_multiple_of(step))
        }
        Item::LastDay => days(1).month() != date.month(),
        Item::Nearest(day) => {
            let Some(named) = date.with_day(day) else { return false };
            let near = [0, -1, 1, -2, 2].map(|away| named + TimeDelta::days(away));
            let works = |day: &NaiveDate| !matches!(day.weekday(), Weekday::Sat | Weekday::Sun);
            near.iter().find(|day| day.month() == date.month() && works(day)) == Some(&date)
        }
        Item::Week(weekday, week) => numbers.contains(&weekday) && date.day().div_ceil(7) == week,
        Item::LastWeek(weekday) => numbers.contains(&weekday) && days(7).month() != date.month(),
    }
}

#[test]
fn random_patterns_match_the_same_minutes_as_their_oracle() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut patterns, mut slots) = (0, 0);
    while patterns < 300 {
        let ranges = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)];
        let fields = ranges.map(|(first, last)| field(&mut random, first, last));
        let text = fields.each_ref().map(|(text, _)| text.as_str()).join(" ");
        // Dates that no month has are another test's.
        let Ok(pattern) = Pattern::parse(&text) else { continue };
        patterns += 1;
        let [minutes, hours, days, months, weekdays] = fields;
        let any = |items: &[Item], numbers: &[u32], date| items.iter().any(|item| matches(*item, numbers, date));
        let is_due = |day: NaiveDate| {
            let number = day.weekday().num_days_from_sunday();
            let of_month = any(&days.1, &[day.day()], day);
            let of_week = any(&weekdays.1, if number == 0 { &[0, 7] } else { std::slice::from_ref(&number) }, day);
            let and = days.0.starts_with('*') || weekdays.0.starts_with('*');
            any(&months.1, &[day.month()], day) && if and { of_month && of_week } else { of_month || of_week }
        };
        let begin = at("2024-01-01T00:00:00").date() + TimeDelta::days(random.i64(0..3000));
        let mut last = begin.and_time(NaiveTime::MIN) - TimeDelta::seconds(1);
        for day in begin.iter_days().take(120).filter(|day| is_due(*day)) {
            for minute in 0..24 * 60 {
                if any(&hours.1, &[minute / 60], day) && any(&minutes.1, &[minute % 60], day) {
                    let due = day.and_hms_opt(minute / 60, minute % 60, 0).unwrap();
                    last = pattern.next(last).unwrap();
                    assert_eq!(last, due, "{text:?}");
                    slots += 1;
                }
            }
        }
        let next = pattern.next(last).unwrap();
        assert!(next.date() >= begin + TimeDelta::days(120), "{text:?}: {next} after {last}");
    }
    assert!(slots > 400_000, "{slots}");
}

/// The slots after one, as `2026-01-05 00:00`.
fn after(text: &str, begin: &str, count: usize) -> Vec<String> {
    let pattern = Pattern::parse(text).unwrap();
    let slots = std::iter::successors(Some(at(begin)), |slot| pattern.next(*slot));
    slots.skip(1).take(count).map(|slot| slot.format("%F %R").to_string()).collect()
}

#[test]
fn a_day_field_that_begins_with_a_star_is_a_star() {
    let begin = "2026-01-01T12:00:00";
    for (text, slots) in [
        // Each working day; the first Sunday, and the first Monday, of a month.
        ("0 9 */1 * MON-FRI", ["2026-01-02 09:00", "2026-01-05 09:00", "2026-01-06 09:00"]),
        ("0 0 1-7 * */7", ["2026-01-04 00:00", "2026-02-01 00:00", "2026-03-01 00:00"]),
        ("0 0 */100,1-7 * MON", ["2026-01-05 00:00", "2026-02-02 00:00", "2026-03-02 00:00"]),
        ("0 0 * * MON", ["2026-01-05 00:00", "2026-01-12 00:00", "2026-01-19 00:00"]),
        // Without a star in front, either matches.
        ("0 0 13 * FRI", ["2026-01-02 00:00", "2026-01-09 00:00", "2026-01-13 00:00"]),
        ("0 0 13,*/15 * FRI", ["2026-01-02 00:00", "2026-01-09 00:00", "2026-01-13 00:00"]),
    ] {
        assert_eq!(after(text, begin, 3), slots, "{text}");
    }
}

#[test]
fn seven_is_sunday_everywhere() {
    let begin = "2026-01-01T12:00:00";
    for (seven, zero) in [
        ("7", "SUN"),
        ("7L", "0L"),
        ("5L,7L", "0#L,FRI#L"),
        ("7#2", "SUN#2"),
        ("5-7", "FRI,SAT,SUN"),
        ("0-7", "*"),
        ("5-7#L", "5L,6L,0L"),
    ] {
        let [seven, zero] = [seven, zero].map(|days| after(&format!("0 0 * * {days}"), begin, 20));
        assert_eq!(seven, zero);
    }
    assert_eq!(after("0 0 * * 5L,7L", begin, 3), ["2026-01-25 00:00", "2026-01-30 00:00", "2026-02-22 00:00"]);
    assert_eq!(after("0 0 * * FRI-SUN", begin, 3), ["2026-01-02 00:00", "2026-01-03 00:00", "2026-01-04 00:00"]);
}

#[test]
fn the_nearest_working_day_is_in_the_same_month() {
    let begin = "2026-05-01T12:00:00";
    // The 1st of August is a Saturday, the 31st of May a Sunday. September and June have 30 days.
    for (day, slots) in [
        ("1W", ["2026-06-01 00:00", "2026-07-01 00:00", "2026-08-03 00:00"]),
        ("31W", ["2026-05-29 00:00", "2026-07-31 00:00", "2026-08-31 00:00"]),
        ("15W", ["2026-05-15 00:00", "2026-06-15 00:00", "2026-07-15 00:00"]),
        ("16W", ["2026-05-15 00:00", "2026-06-16 00:00", "2026-07-16 00:00"]),
        ("17W", ["2026-05-18 00:00", "2026-06-17 00:00", "2026-07-17 00:00"]),
    ] {
        assert_eq!(after(&format!("0 0 {day} * *"), begin, 3), slots, "{day}");
    }
}

#[test]
fn a_short_form_is_its_pattern() {
    for (form, pattern) in SHORT_FORMS {
        for form in [form.to_owned(), form.to_ascii_uppercase()] {
            assert_eq!(after(&form, "2026-01-01T00:00:00", 5), after(pattern, "2026-01-01T00:00:00", 5), "{form}");
        }
        assert!(ONLY_SHORT_FORMS.contains(form), "{form}");
    }
}

#[test]
fn a_search_ends_with_the_calendar() {
    let pattern = Pattern::parse("0 0 29 2 *").unwrap();
    assert_eq!(pattern.next(at("2096-03-01T00:00:00")), Some(at("2104-02-29T00:00:00")));
    assert_eq!(pattern.next(NaiveDateTime::MAX), None);
    assert_eq!(pattern.next(NaiveDate::MAX.and_time(NaiveTime::MIN)), None);
    let pattern = Pattern::parse("59 59 23 29 2 MON#5").unwrap();
    assert!(pattern.next(NaiveDateTime::MIN).is_some());
}

/// A text that is refused, and what the message says.
const REFUSED: &[(&str, &str)] = &[
    ("", "it needs five fields, or six with seconds in front, and has 0"),
    ("* * * *", "and has 4"),
    ("0 0 0 1 1 * 2030", "and has 7"),
    ("61 * * * *", "the minute \"61\": 61 is not one of 0 to 59"),
    ("0 25 * * *", "the hour \"25\""),
    ("0 0 0 * *", "the day of the month \"0\": 0 is not one of 1 to 31"),
    ("0 0 * 13 *", "1 to 12"),
    ("0 0 * * 8", "0 to 7"),
    ("99999999999999999999 * * * *", "the minute"),
    ("x * * * *", "write a number from 0 to 59, a range like 0-59, or *"),
    ("-1 * * * *", "write a number"),
    ("+1 * * * *", "write a number"),
    ("1- * * * *", "write a number"),
    ("*-5 * * * *", "write a number"),
    ("0 0 30 2 *", "no time matches it"),
    ("0 0 31 4,6,9,11 *", "no time matches it"),
    ("0 0 30W 2 *", "no time matches it"),
    // Names belong to a field, and stand alone or as ends of a range.
    ("MON * * * *", "names are JAN to DEC for months"),
    ("0 JAN * * *", "names are JAN to DEC for months"),
    ("0 0 FRI * *", "names are JAN to DEC for months"),
    ("MON 0 0 * * *", "names are JAN to DEC for months"),
    ("0 0 1-MAR * *", "names are JAN to DEC for months"),
    ("0 9 * MON-FRI *", "names are JAN to DEC for months"),
    ("0 9 * * JAN", "SUN to SAT for days of the week"),
    ("0 9 * * dau", "the day of the week \"dau\": names are"),
    ("0 0 1 JAN1 *", "JAN1 is no name: write JAN"),
    ("0 0 1 january *", "write JAN"),
    ("0 0 * * SUN5", "SUN5 is no name: write SUN"),
    ("0 0 * * MONDAY", "write MON"),
    ("0 0 * * SUN-SUN", "write SUN for that day, or * for every day"),
    ("0 0 * * 0-SUN", "write SUN"),
    ("0 0 * * SUN-7", "write SUN"),
    // `L`, `W` and `#`.
    ("0 0 15W3 * *", "15W for the working day nearest to the 15th"),
    ("0 0 W15 * *", "15W"),
    ("0 0 LW * *", "the last working day has no pattern"),
    ("0 0 L-3 * *", "write L for the last day"),
    ("0 0 L/2 * *", "write L for the last day"),
    ("0 0 32W * *", "32 is not one of 1 to 31"),
    ("0 0 W * *", "write a number"),
    ("0 0 1 * L", "write 5L or FRI#L for the last Friday"),
    ("0 0 1 * MONL", "write MON#L"),
    ("0 0 1 * 1-5L", "write 1-5#L"),
    ("0 0 1 * 8L", "write"),
    ("0 0 1 * +5L", "L stands behind one number"),
    ("0 0 1 * 5#2L", "write FRI#2 or FRI#L"),
    ("0 0 1 * 5#6", "one of 1 to 5"),
    ("0 0 1 * 5#0", "one of 1 to 5"),
    ("0 0 1 * #2", "write a number"),
    ("0 0 1 * 5#", "one of 1 to 5"),
    ("0 0 * L *", "write a number"),
    // Lists.
    ("0 0 * * MON,,WED", "remove the one"),
    (",1 * * * *", "remove the one"),
    ("1, * * * *", "remove the one"),
    // Steps.
    (
        "*/90 * * * *",
        "the minute \"*/90\": a step of 90 leaves nothing but 0: write 0, or set a fixed rate, such as every 90m",
    ),
    ("*/60 * * * *", "write 0"),
    ("*/60 * * * * *", "the second"),
    ("0 */25 * * *", "write 0, or set a fixed rate, such as every 25h"),
    ("0 0 */31 * *", "write 1"),
    ("0 0 1 */13 *", "a step of 13 leaves nothing but 1: write 1"),
    ("0 0 1 */12 *", "write 1"),
    ("0 0 * * */8", "write 0"),
    ("0 0 */32 * *", "write 1"),
    ("10-20/30 * * * *", "leaves nothing but 10: write 10"),
    ("50/15 * * * *", "write 50"),
    ("*/0 * * * *", "a step is a number from 1 on"),
    ("*/ * * * *", "a step is a number"),
    ("*/x * * * *", "a step is a number"),
    ("*/5/5 * * * *", "a step is a number"),
    // Other programs' patterns.
    ("0 22-6 * * *", "a range does not go beyond 23: write 22-23,0-6"),
    ("0 0 1 11-2 *", "a range does not go beyond 12: write 11-12,1-2"),
    ("0 0 * * FRI-MON", "write FRI-SAT,SUN-MON"),
    ("0 0 * * 5-1", "write 5-6,0-1"),
    ("0 0 * NOV-FEB *", "write NOV-DEC,JAN-FEB"),
    ("0 0 12 ? * 2", "write * in its place, and days of the week by their names, since Quartz numbers Sunday 1"),
    ("CRON_TZ=Europe/Berlin 0 9 * * *", "set it with Schedule::zone"),
    ("@reboot", "@yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly"),
];

#[test]
fn what_is_refused_says_what_to_write_instead() {
    for (text, says) in REFUSED {
        let wrong = Pattern::parse(text).expect_err(text);
        assert!(wrong.contains(says), "{text:?}: {wrong}");
    }
    // What a message says to write is accepted.
    for text in ["22-23,0-6", "0-23/23", "*/59"] {
        Pattern::parse(&format!("0 {text} * * *")).or_else(|_| Pattern::parse(&format!("{text} * * * *"))).unwrap();
    }
    let days = ["FRI-SAT,SUN-MON", "5-6,0-1", "SUN", "5L", "FRI#L", "1-5#L", "MON#L", "FRI#2", "*/7", "0-7", "7-7"];
    for days in days {
        Pattern::parse(&format!("0 0 1 * {days}")).unwrap();
    }
    for text in
        ["0 0 1 NOV-DEC,JAN-FEB *", "0 0 L * *", "5-5/1 * * * *", "0 0 29 2 *", "*/10 * * * * *", "0 0 */32 * MON"]
    {
        Pattern::parse(text).unwrap();
    }
}

/// No text makes the parser or the search panic.
#[test]
fn any_text_is_read_or_refused() {
    let mut random = fastrand::Rng::with_seed(11);
    let pieces = ["*", "/", "-", ",", "#", "L", "W", "?", "0", "7", "59", "SUN", "JAN", " ", "@", "é", "="];
    let mut read = 0;
    for _ in 0..20_000 {
        let mut piece = || pieces[random.usize(..pieces.len())];
        let field = |piece: &mut dyn FnMut() -> &'static str| [piece(), piece(), piece()].concat();
        let text = [(); 5].map(|()| field(&mut piece)).join(" ");
        for text in
            [text.as_str(), &format!("0 0 {} 1 *", field(&mut piece)), &format!("0 0 1 1 {}", field(&mut piece))]
        {
            if let Ok(pattern) = Pattern::parse(text) {
                read += 1;
                assert!(pattern.next(NaiveDateTime::default()).is_some(), "{text}");
            }
        }
    }
    assert!(read > 100, "{read}");
}
