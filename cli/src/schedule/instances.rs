//! `instances`: what runs schedules, and what each instance declares.

use anstyle::{AnsiColor, Style};
use rowlock::{Database, Schedules, admin::InstanceInfo};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    args::schedules::Instances,
    exit::{Failure, REFUSED},
    format::{clock, or_dash, precise, tabular},
    operator::logged,
    out::{self, printable},
};

pub async fn instances<DB: Database>(schedules: &Schedules<DB>, asked: &Instances) -> Result<u8, Failure> {
    if let Some(id) = asked.forget {
        return forget(schedules, id).await;
    }
    let all = schedules.instances().await?;
    if asked.json {
        out::say_json(&all.iter().map(object).collect())
    } else {
        let names = ["LABEL", "BUILD", "SINCE", "LAST BEAT", "STATE", "DECLARES", "ID"];
        out::say(tabular(names, all.iter().map(row)))
    }
}

fn row(instance: &InstanceInfo) -> (Style, [String; 7]) {
    let (since, beat, id) = (clock(instance.since), clock(instance.beat), instance.id.to_string());
    let cells = [&instance.label, or_dash(&instance.build), &since, &beat, state(instance), &declares(instance), &id];
    let colour = if instance.alive { AnsiColor::Green } else { AnsiColor::Yellow };
    (colour.on_default(), cells.map(printable))
}

/// Says whether the instance counts as alive. A crontab has no process between its ticks.
pub fn state(instance: &InstanceInfo) -> &'static str {
    match (instance.alive, instance.calls) {
        (true, false) => "alive",
        (true, true) => "alive, crontab",
        (false, false) => "silent",
        (false, true) => "silent, crontab",
    }
}

/// Returns how many schedules the instance declares, and the name of the set, which instances that
/// declare the same have in common.
pub fn declares(instance: &InstanceInfo) -> String {
    let number = instance.declares.len();
    format!("{number} {} ({})", if number == 1 { "schedule" } else { "schedules" }, set(instance))
}

/// Returns a short hash of what an instance declares (FNV-1a).
fn set(instance: &InstanceInfo) -> String {
    let texts = instance.declares.iter().flat_map(|one| [&one.name, &one.times, &one.zone]);
    let bytes = texts.flat_map(|text| text.bytes().chain([0]));
    let hash = bytes.fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

fn object(instance: &InstanceInfo) -> Value {
    let declares = instance.declares.iter();
    let declares = declares.map(|one| json!({ "name": one.name, "times": one.times, "zone": one.zone }));
    json!({
        "id": instance.id.to_string(),
        "label": instance.label,
        "build": instance.build,
        "calls": instance.calls,
        "since": precise(instance.since),
        "beat": precise(instance.beat),
        "alive": instance.alive,
        "set": set(instance),
        "declares": declares.collect::<Vec<_>>(),
    })
}

/// Removes the declarations of an instance.
async fn forget<DB: Database>(schedules: &Schedules<DB>, id: Uuid) -> Result<u8, Failure> {
    let all = schedules.instances().await?;
    let was = all.iter().find(|instance| instance.id == id);
    let no_instance = || Failure::new(REFUSED, format!("there is no instance {id}: `rowlock instances` lists them"));
    let forgotten = schedules.forget_instance(id).await.map_err(Failure::from);
    let forgotten = forgotten.and_then(|is_forgotten| is_forgotten.then_some(()).ok_or_else(no_instance));
    logged("forget instance", &id.to_string(), forgotten, |()| {
        was.map_or_else(|| "-".to_owned(), |was| format!("{}, {}", was.label, state(was)))
    })?;
    out::say(format_args!("{id} is forgotten; if it is alive, it announces itself again"))
}
