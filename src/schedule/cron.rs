//! Cron patterns: which times of a wall clock a text matches.
//!
//! Debian's cron is the reference. `L`, `W` and `#` are additions to it. A text that other crons
//! read in another way is refused, and the error says what to write instead.

use chrono::{Datelike as _, NaiveDate, NaiveDateTime, NaiveTime, TimeDelta, Timelike as _, Weekday};

/// After this many days the calendar repeats, with its days of the week.
const CALENDAR: usize = 146_097;

/// What stands for a whole pattern.
const SHORT_FORMS: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

const ONLY_SHORT_FORMS: &str = "the short forms are @yearly, @annually, @monthly, @weekly, @daily, @midnight and \
     @hourly; a period is set as a fixed rate (every), and no schedule is for the start of a machine";
const ZONE_APART: &str = "a zone does not stand in the pattern: set it with Schedule::zone, with zone = \"Europe/Berlin\" \
     in a file of jobs, or with --zone Europe/Berlin";
const QUARTZ: &str = "\"?\" is Quartz's: write * in its place, and days of the week by their names, since Quartz numbers \
     Sunday 1 and crontabs number it 0";
const ONLY_NAMES: &str = "names are JAN to DEC for months, and SUN to SAT for days of the week";

/// A cron pattern of five fields, or of six with seconds.
#[derive(Clone, Debug)]
pub struct Pattern {
    seconds: u64,
    minutes: u64,
    hours: u64,
    months: u64,
    days: Values,
    weekdays: Values,
    /// Both day fields have to match, and not either: one of them begins with `*`.
    both: bool,
}

/// What a field matches. The number N is the bit N.
#[derive(Clone, Debug, Default)]
struct Values {
    /// Numbers. Sunday is 0.
    of: u64,
    /// The last day of the month.
    last_day: bool,
    /// The days of the month whose nearest working day matches.
    nearest: u64,
    /// The days of the week that match in the first to fifth week of the month only, and as the
    /// last ones of the month.
    weeks: [u64; 6],
}

/// The place of the last week in `Values::weeks`.
const LAST: usize = 5;

fn has(bits: u64, number: u32) -> bool {
    bits >> number & 1 == 1
}

/// Returns the first number from `from` on.
fn first(bits: u64, from: u32) -> Option<u32> {
    let rest = bits >> from;
    (rest != 0).then(|| from + rest.trailing_zeros())
}

impl Pattern {
    /// Parses a pattern. The error says what is wrong with the text, and what to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut fields: Vec<&str> = text.split_whitespace().collect();
        if text.starts_with('@') {
            let form = SHORT_FORMS.iter().find(|(name, _)| text.eq_ignore_ascii_case(name));
            fields = form.ok_or(ONLY_SHORT_FORMS)?.1.split(' ').collect();
        }
        if text.contains('=') {
            return Err(ZONE_APART.to_owned());
        }
        if fields.contains(&"?") {
            return Err(QUARTZ.to_owned());
        }
        if fields.len() == 5 {
            fields.insert(0, "0");
        }
        let &[second, minute, hour, day, month, weekday] = fields.as_slice() else {
            return Err(format!("it needs five fields, or six with seconds in front, and has {}", fields.len()));
        };
        // A step that leaves one day is how both day fields are made to match, as in
        // `0 0 */100,1-7 * MON`.
        let marks = |field: &str, other| field.starts_with('*') && other != "*";
        let pattern = Self {
            seconds: SECOND.parse(second, false)?.of,
            minutes: MINUTE.parse(minute, false)?.of,
            hours: HOUR.parse(hour, false)?.of,
            days: DAY.parse(day, marks(day, weekday))?,
            months: MONTH.parse(month, false)?.of,
            weekdays: WEEKDAY.parse(weekday, marks(weekday, day))?,
            both: day.starts_with('*') || weekday.starts_with('*'),
        };
        match pattern.date_from(NaiveDate::default()) {
            Some(_) => Ok(pattern),
            None => Err("no time matches it".to_owned()),
        }
    }

    /// Returns whether every hour matches.
    pub fn is_hourly(&self) -> bool {
        self.hours == (1 << 24) - 1
    }

    /// Returns the first match after a time of the wall clock. There is none if the search leaves
    /// the calendar.
    pub fn next(&self, after: NaiveDateTime) -> Option<NaiveDateTime> {
        let from = after.with_nanosecond(0)?.checked_add_signed(TimeDelta::seconds(1))?;
        if self.matches(from.date())
            && let Some(time) = self.time_from(from.time())
        {
            return Some(from.date().and_time(time));
        }
        let date = self.date_from(from.date().succ_opt()?)?;
        Some(date.and_time(self.time_from(NaiveTime::MIN)?))
    }

    fn date_from(&self, mut date: NaiveDate) -> Option<NaiveDate> {
        for _ in 0..CALENDAR {
            if !has(self.months, date.month()) {
                let first = date.with_day(1)?;
                date = first.checked_add_months(chrono::Months::new(1))?;
                continue;
            }
            if self.matches(date) {
                return Some(date);
            }
            date = date.succ_opt()?;
        }
        None
    }

    fn time_from(&self, time: NaiveTime) -> Option<NaiveTime> {
        let (mut hour, mut minute, mut second) = (time.hour(), time.minute(), first(self.seconds, time.second()));
        if second.is_none() || !has(self.minutes, minute) || !has(self.hours, hour) {
            second = first(self.seconds, 0);
            let later = if has(self.hours, hour) { first(self.minutes, minute + 1) } else { None };
            (hour, minute) = match later {
                Some(minute) => (hour, minute),
                None => (first(self.hours, hour + 1)?, first(self.minutes, 0)?),
            };
        }
        NaiveTime::from_hms_opt(hour, minute, second?)
    }

    fn matches(&self, date: NaiveDate) -> bool {
        let (day, length) = (date.day(), u32::from(date.num_days_in_month()));
        let of_month = has(self.days.of, day)
            || (self.days.last_day && day == length)
            || (self.days.nearest != 0 && self.is_nearest(date.weekday(), day, length));
        let weekday = date.weekday().num_days_from_sunday();
        let in_week = |week: usize| self.weekdays.weeks.get(week).is_some_and(|bits| has(*bits, weekday));
        let of_week =
            has(self.weekdays.of, weekday) || in_week((day as usize - 1) / 7) || (day + 7 > length && in_week(LAST));
        let in_month = has(self.months, date.month());
        in_month && if self.both { of_month && of_week } else { of_month || of_week }
    }

    /// Returns whether a day is the working day that is nearest to a day of the pattern, in the
    /// same month. The days of shorter months do not exist.
    fn is_nearest(&self, weekday: Weekday, day: u32, length: u32) -> bool {
        let to = |day: u32| day <= length && has(self.days.nearest, day);
        match weekday {
            Weekday::Sat | Weekday::Sun => false,
            Weekday::Mon => to(day) || to(day - 1) || (day == 3 && to(1)),
            Weekday::Fri => to(day) || to(day + 1) || (day + 2 == length && to(length)),
            _ => to(day),
        }
    }
}

/// A field of a pattern.
struct Field {
    name: &'static str,
    /// The first number, and that of the first of the names.
    first: u32,
    last: u32,
    names: &'static [&'static str],
    /// The unit in a fixed rate, if it has one.
    unit: Option<&'static str>,
}

const SECOND: Field = Field { name: "second", first: 0, last: 59, names: &[], unit: Some("s") };
const MINUTE: Field = Field { name: "minute", first: 0, last: 59, names: &[], unit: Some("m") };
const HOUR: Field = Field { name: "hour", first: 0, last: 23, names: &[], unit: Some("h") };
const DAY: Field = Field { name: "day of the month", first: 1, last: 31, names: &[], unit: Some("days") };
const MONTH: Field = Field {
    name: "month",
    first: 1,
    last: 12,
    names: &["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"],
    unit: None,
};
const WEEKDAY: Field = Field {
    name: "day of the week",
    first: 0,
    last: 7,
    names: &["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"],
    unit: None,
};

impl Field {
    fn is(&self, other: &Self) -> bool {
        self.name == other.name
    }

    /// Reads the list of a field. With `marks`, the step of a star may leave one value.
    fn parse(&self, text: &str, marks: bool) -> Result<Values, String> {
        let upper = text.to_ascii_uppercase();
        let mut values = Values::default();
        for item in upper.split(',') {
            self.item(item, marks, &mut values).map_err(|wrong| format!("the {} {text:?}: {wrong}", self.name))?;
        }
        Ok(values)
    }

    /// Reads one item of the list.
    fn item(&self, item: &str, marks: bool, values: &mut Values) -> Result<(), String> {
        if item.is_empty() {
            return Err("a comma stands between two values: remove the one beside which a value is missing".to_owned());
        }
        if self.is(&DAY) {
            if item == "L" {
                values.last_day = true;
                return Ok(());
            }
            if let Some(day) = item.strip_suffix('W') {
                values.nearest |= 1 << self.value(day)?;
                return Ok(());
            }
        }
        if self.is(&WEEKDAY)
            && let Some((days, week)) = self.week(item)?
        {
            values.weeks[week] |= days;
            return Ok(());
        }
        let (range, step) = match item.split_once('/') {
            Some((range, step)) => (range, Some(step)),
            None => (item, None),
        };
        let (low, high) = self.range(range, step.is_some())?;
        let step = step.map_or(Ok(1), |step| self.step(step, low, high, marks && range == "*"))?;
        values.of |= self.bits(low, high, step);
        Ok(())
    }

    /// Returns the numbers of a range as bits. 7 is Sunday as 0 is.
    fn bits(&self, low: u32, high: u32, step: usize) -> u64 {
        let bits = (low..=high).step_by(step).fold(0, |bits, number| bits | 1 << number);
        if self.is(&WEEKDAY) { (bits | bits >> 7) & 0x7f } else { bits }
    }

    /// Returns the days of the week, and the place of the week, of an item like `FRI#2` or `5L`.
    fn week(&self, item: &str) -> Result<Option<(u64, usize)>, String> {
        if let Some((days, week)) = item.split_once('#') {
            let place = ["1", "2", "3", "4", "5", "L"].iter().position(|name| *name == week);
            let place = place.ok_or("behind # stands one of 1 to 5, or L for the last: write FRI#2 or FRI#L")?;
            let (low, high) = self.range(days, false)?;
            return Ok(Some((self.bits(low, high, 1), place)));
        }
        let Some(day) = item.strip_suffix('L') else { return Ok(None) };
        match number(day) {
            Some(day @ 0..=7) => Ok(Some((self.bits(day, day, 1), LAST))),
            _ if day.is_empty() => Err("L stands behind a day here: write 5L or FRI#L for the last Friday".to_owned()),
            _ => Err(format!("L stands behind one number: write {day}#L")),
        }
    }

    /// Returns the ends of a range. A number with a step reaches to the end of the field.
    fn range(&self, text: &str, stepped: bool) -> Result<(u32, u32), String> {
        if text == "*" {
            return Ok((self.first, self.last));
        }
        let Some((from, to)) = text.split_once('-') else {
            let number = self.value(text)?;
            return Ok((number, if stepped { self.last } else { number }));
        };
        let (low, high) = (self.value(from)?, self.value(to)?);
        // Sunday ends a week by its name too.
        let high = if to == "SUN" { 7 } else { high };
        if high == 7 && low % 7 == 0 && text.contains("SUN") {
            return Err("it begins and ends with Sunday: write SUN for that day, or * for every day".to_owned());
        }
        if low > high {
            let ends = [self.names.first(), self.names.last()].map(|name| name.copied().map(str::to_owned));
            let [first, last] = match ends {
                [Some(first), Some(last)] if self.names.contains(&from) => [first, last],
                [Some(_), Some(_)] if self.is(&WEEKDAY) => ["0".to_owned(), "6".to_owned()],
                _ => [self.first.to_string(), self.last.to_string()],
            };
            let rest = if low == 7 { String::new() } else { format!("{from}-{last},") };
            return Err(format!("a range does not go beyond {last}: write {rest}{first}-{to}"));
        }
        Ok((low, high))
    }

    fn step(&self, text: &str, low: u32, high: u32, marks: bool) -> Result<usize, String> {
        let step = number(text).filter(|step| *step > 0).ok_or("a step is a number from 1 on, as in */5")?;
        if step > 1 && step > high - low && !marks {
            let rate = self.unit.map(|unit| format!(", or set a fixed rate, such as every {step}{unit}"));
            let rate = rate.unwrap_or_default();
            return Err(format!("a step of {step} leaves nothing but {low}: write {low}{rate}"));
        }
        Ok(step as usize)
    }

    fn value(&self, text: &str) -> Result<u32, String> {
        let (first, last) = (self.first, self.last);
        if let Some(place) = self.names.iter().position(|name| *name == text) {
            return Ok(first + place as u32);
        }
        if let Some(value) = number(text) {
            let possible = (first..=last).contains(&value);
            return possible.then_some(value).ok_or_else(|| format!("{text} is not one of {first} to {last}"));
        }
        let is_word = text.len() > 1 && text.starts_with(|c: char| c.is_ascii_alphabetic());
        Err(match self.names.iter().find(|name| text.starts_with(**name)) {
            Some(name) => format!("{text} is no name: write {name}"),
            None if self.is(&DAY) && text.contains(['L', 'W']) => {
                "write L for the last day, 15W for the working day nearest to the 15th, and FRI#L as the day of the \
                 week for the last Friday; the last working day has no pattern"
                    .to_owned()
            }
            None if is_word => ONLY_NAMES.to_owned(),
            None => format!("write a number from {first} to {last}, a range like {first}-{last}, or *"),
        })
    }
}

/// Reads a number that has digits alone.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
#[path = "cron_tests.rs"]
mod tests;
