//! `pause`, `resume`, `skip`, `stop`, `trigger`, `remove`, `reset` and `drain`.

use rowlock::{
    Database, Schedules,
    admin::{InstanceInfo, ScheduleInfo},
};

use crate::{
    args::schedules::{Named, Trigger, Until},
    exit::{Failure, REFUSED},
    format::{clock, clock_or_dash},
    operator::logged,
    out::{self, printable},
    schedule::{
        show::{find, object, times},
        state::{described, is_declared_as_removed, nobody_runs},
    },
};

pub async fn pause<DB: Database>(schedules: &Schedules<DB>, asked: &Until) -> Result<u8, Failure> {
    let name = asked.named.name.as_str();
    let was = state_of(schedules, name).await?;
    let (done, until) = match asked.until {
        None => (schedules.pause(name).await, String::new()),
        Some(until) => (schedules.pause_until(name, until).await, format!(" until {}", clock(until))),
    };
    logged("pause", name, done, |()| was)?;
    print_change(schedules, &asked.named, &format!("is paused{until}")).await
}

pub async fn resume<DB: Database>(schedules: &Schedules<DB>, named: &Named) -> Result<u8, Failure> {
    let name = named.name.as_str();
    let was = state_of(schedules, name).await?;
    logged("resume", name, schedules.resume(name).await, |()| was)?;
    print_change(schedules, named, "is resumed").await
}

pub async fn skip<DB: Database>(schedules: &Schedules<DB>, asked: &Until) -> Result<u8, Failure> {
    let name = asked.named.name.as_str();
    let was = state_of(schedules, name).await?;
    let skipped = match asked.until {
        Some(until) => schedules.skip_until(name, until).await.map(|()| format!("all ticks until {}", clock(until))),
        None => schedules.skip(name).await.map(|tick| format!("the tick of {}", clock(tick))),
    };
    let skipped = logged("skip", name, skipped, |_| was)?;
    print_change(schedules, &asked.named, &format!("is skipped: {skipped}; `rowlock resume` takes it back")).await
}

pub async fn stop<DB: Database>(schedules: &Schedules<DB>, named: &Named) -> Result<u8, Failure> {
    let name = named.name.as_str();
    let before = find(schedules, name).await?;
    let stopped = schedules.stop(name).await.map_err(Failure::from);
    let stopped = stopped.and_then(|is_stopped| is_stopped.then_some(()).ok_or_else(|| nothing_to_stop(name)));
    logged("stop", name, stopped, |()| described(&before))?;
    let what = match before.running {
        true => format!("is to stop: {}", who_stops(&before, &schedules.instances().await.unwrap_or_default())),
        false => "is stopped: its tick is not tried again".to_owned(),
    };
    print_change(schedules, named, &format!("{what}{}", what_follows(&before))).await
}

pub fn nothing_to_stop(name: &str) -> Failure {
    Failure::new(REFUSED, format_args!("{name}: no tick was begun that could be stopped"))
}

/// Says who stops a run, and what if that one is silent.
fn who_stops(info: &ScheduleInfo, instances: &[InstanceInfo]) -> String {
    let heard = instances.iter().filter(|one| one.label == info.by).map(|one| (one.alive, one.beat)).max();
    let seen = "`rowlock why` shows it until then";
    match heard {
        Some((false, beat)) => format!(
            "{} is silent since {}, and its command may go on; another instance ends the tick when the lease is over",
            info.by,
            clock(beat)
        ),
        _ => format!("{} stops its command within 20 seconds and its --stop-timeout; {seen}", info.by),
    }
}

/// Says that another tick is due already.
fn what_follows(info: &ScheduleInfo) -> String {
    let next = match info.run_slot == Some(info.slot) {
        true => info.schedule().and_then(|schedule| schedule.upcoming(info.slot).ok()?.next()),
        // It was triggered.
        false => Some(info.slot),
    };
    let next = next.filter(|next| *next <= info.now);
    let says = |next| {
        format!(
            "; its tick of {} is due, and begins after that unless it is paused, or skipped until later",
            clock(next)
        )
    };
    next.map(says).unwrap_or_default()
}

pub async fn drain<DB: Database>(schedules: &Schedules<DB>, label: &str) -> Result<u8, Failure> {
    let instances = schedules.instances().await?;
    let silent = instances.iter().filter(|one| one.label == label && !one.calls && !one.alive).count();
    let known = match schedules.drain(label).await? {
        0 => Err(Failure::new(REFUSED, format!("no instance has the label {label:?}: `rowlock instances` lists them"))),
        known => Ok(known),
    };
    let known = logged("drain", label, known, |known| format!("{known} known, {silent} silent"))?;
    let end = match known {
        1 => "1 instance ends after its runs, for which it has its own --drain",
        _ => &format!("{known} instances end after their runs, for which each has its own --drain"),
    };
    let silent = match silent {
        0 => "",
        1 => "; 1 of them is silent, and ends after its next beat",
        _ => &format!("; {silent} of them are silent, and end after their next beat"),
    };
    out::say(format_args!("{}: {end}{silent}", printable(label)))
}

/// Describes a schedule before it is changed.
async fn state_of<DB: Database>(schedules: &Schedules<DB>, name: &str) -> Result<String, Failure> {
    find(schedules, name).await.map(|info| described(&info))
}

pub async fn trigger<DB: Database>(schedules: &Schedules<DB>, trigger: &Trigger) -> Result<u8, Failure> {
    let name = trigger.named.name.as_str();
    let was = find(schedules, name).await?;
    let asked = ask_for_run(schedules, name, trigger.anyway, "--anyway asks for the run all the same").await;
    logged("trigger", name, asked, |()| described(&was))?;
    let info = find(schedules, name).await?;
    let what = match (nobody_runs(&info), info.paused) {
        (Some(why), _) => format!("is triggered, though {why}: the next instance that declares it runs it"),
        (None, true) => "is triggered, but paused: it runs once it is resumed".to_owned(),
        (None, false) => "is triggered: the next instance that polls runs it".to_owned(),
    };
    // One that waits is not asked for again. A trigger during a triggered run is another one.
    let what = match was.triggered.filter(|_| !was.running) {
        Some(at) => format!("{what} (it was triggered already at {}: both are one run)", clock(at)),
        None => what,
    };
    print_change(schedules, &trigger.named, &what).await
}

/// Asks for a run, if an instance that is alive would run it.
pub async fn ask_for_run<DB: Database>(
    schedules: &Schedules<DB>,
    name: &str,
    anyway: bool,
    advice: &str,
) -> Result<(), Failure> {
    let info = find(schedules, name).await?;
    let refused = |why: &str| Err(Failure::new(REFUSED, format_args!("{name}: not triggered: {why}")));
    match nobody_runs(&info) {
        Some(why) if is_declared_as_removed(&info) => refused(&why),
        Some(why) if !anyway => refused(&format!("{why}; {advice}")),
        _ => Ok(schedules.trigger(name).await?),
    }
}

pub async fn remove<DB: Database>(schedules: &Schedules<DB>, name: &str) -> Result<u8, Failure> {
    let was = schedules.inspect(name).await?;
    logged("remove", name, schedules.remove(name).await, |()| match &was {
        Some(was) => format!("{}, {}", times(was), described(was)),
        None => "-".to_owned(),
    })?;
    out::say(format_args!("{} is removed; its runs stay in the history", printable(name)))
}

pub async fn reset<DB: Database>(schedules: &Schedules<DB>, named: &Named) -> Result<u8, Failure> {
    let name = named.name.as_str();
    let was = schedules.inspect(name).await?;
    let slot = logged("reset", name, schedules.reset(name).await, |slot| {
        let was = clock_or_dash(was.as_ref().map(|was| was.slot));
        format!("{was}, and is {} now", clock(*slot))
    })?;
    print_change(schedules, named, &format!("is reset: the next tick is at {}", clock(slot))).await
}

/// Says what was changed.
async fn print_change<DB: Database>(schedules: &Schedules<DB>, named: &Named, what: &str) -> Result<u8, Failure> {
    let name = named.name.as_str();
    match named.json {
        true => out::say_json(&object(&find(schedules, name).await?)),
        false => out::say(format_args!("{} {}", printable(name), printable(what))),
    }
}
