//! What takes the tables, the columns and the functions away, and what stands in its way.

use crate::store::schema::{INSTANCES, SCHEDULE, Schema, Step};

/// Returns the statements that leave the article's table alone: between the lock and its end the
/// tables, which takes the right that is likeliest to lack, and the columns; then the functions.
pub fn removal(
    schema: &Schema,
    together: bool,
    routine: &str,
    lock: (&str, &str, &str),
    end: Option<Step>,
) -> Vec<Step> {
    let (before, between, after) = lock;
    let ours: Vec<&str> =
        schema.ours.iter().map(|(name, _)| *name).filter(|name| schema.column(name).is_some()).collect();
    if ours.is_empty() && schema.tables().next().is_none() && schema.routines.is_empty() {
        return Vec::new();
    }
    let mut steps = Vec::new();
    if !schema.columns.is_empty() && !before.is_empty() {
        let tables = schema.tables().chain(["t_resource_lock"]).collect::<Vec<_>>().join(between);
        steps.push(Step { sql: format!("{before}{tables}{after}"), locks: "exclusive, on these, up to the end" });
    }
    let dropped = |sql: String| Step { sql, locks: "exclusive, on what is dropped" };
    steps.extend(schema.tables().map(|table| dropped(format!("DROP TABLE {table}"))));
    let columns: Vec<String> = match together {
        true if ours.is_empty() => Vec::new(),
        true => vec![ours.join(",\n    DROP COLUMN ")],
        false => ours.into_iter().map(str::to_owned).collect(),
    };
    steps.extend(columns.into_iter().map(|columns| Step {
        sql: format!("ALTER TABLE t_resource_lock\n    DROP COLUMN {columns}"),
        locks: "exclusive, on t_resource_lock: for a moment where only the definition is changed, else while it is copied",
    }));
    steps.extend(end.filter(|_| !schema.columns.is_empty()));
    steps.extend(schema.routines.iter().map(|name| dropped(format!("DROP {routine} {name}"))));
    steps
}

/// Returns how many of the steps come before the tables are locked.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn until_locked(steps: &[Step]) -> usize {
    steps.iter().position(|step| step.sql.starts_with("LOCK TABLE")).map_or(0, |at| at + 1)
}

/// Says what uses the tables, and what to do about it.
pub type Says = fn((String, String)) -> String;

/// Says that a key is claimed.
fn claimed((key, label): (String, String)) -> String {
    format!(
        "key {key:?} is claimed by {label:?}; release it, by force if its holder is gone (`rowlock list --claimed`)"
    )
}

/// Says that a run is under way.
fn running((name, label): (String, String)) -> String {
    format!("{label:?} runs {name:?}; stop it, or wait for the end of its lease")
}

/// Says that an instance is alive.
fn alive((_, label): (String, String)) -> String {
    format!("instance {label:?} runs schedules; stop it, or forget it if it is gone (`rowlock instances --forget`)")
}

/// Returns the statements, of these for claims, runs and instances, whose tables exist. Each one
/// finds one row that needs the tables: its name and its label.
pub fn uses(schema: &Schema, sql: [&'static str; 3]) -> impl Iterator<Item = (&'static str, Says)> {
    let has = |wanted: &str| schema.tables().any(|table| table == wanted);
    // Without the column there are no claims.
    let exist = [schema.column("holder").is_some(), has(SCHEDULE), has(INSTANCES)];
    let says: [Says; 3] = [claimed, running, alive];
    sql.into_iter().zip(says).zip(exist).filter_map(|(one, exists)| exists.then_some(one))
}
