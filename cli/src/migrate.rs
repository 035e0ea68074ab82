//! `rowlock migrate`: previews, completes and removes the tables.

use rowlock::{
    Database,
    migration::{Migration, Plan},
};
use sqlx::Pool;

use crate::{
    args::source::Migrate,
    database::article_clients,
    exit::{self, Failure},
    out,
};

pub async fn migrate<DB: Database>(pool: Pool<DB>, asked: &Migrate) -> Result<u8, Failure> {
    let migration = described(pool).functions(asked.functions);
    let (plan, nothing) = match (asked.undo, asked.yes, asked.dry_run) {
        (true, true, _) => (migration.undo().await?, "there is nothing to take away"),
        (true, false, _) => (migration.plan_undo().await?, "there is nothing to take away"),
        (false, _, true) => (migration.plan().await?, "the tables are complete"),
        (false, _, false) => (run(&migration).await?, "the tables are complete"),
    };
    let is_denied = plan.notes().iter().any(|note| note.contains("could not be created"));
    if plan.is_empty() {
        for note in plan.notes() {
            out::say(format_args!("-- NOTE: {note}"))?;
        }
        if !is_denied {
            out::say(format_args!("-- {nothing}"))?;
        }
    } else {
        out::say(plan.to_string().trim_end())?;
    }
    Ok(if is_denied { exit::UNFIT } else { exit::OK })
}

/// Describes the migration, with the other programs on the table.
pub fn described<DB: Database>(pool: Pool<DB>) -> Migration<DB> {
    let migration = Migration::new(pool);
    match article_clients() {
        Some(offset) => migration.article_clients(offset),
        None => migration,
    }
}

/// Prints what is known before anything is changed, and returns what was done.
async fn run<DB: Database>(migration: &Migration<DB>) -> Result<Plan, Failure> {
    for note in migration.plan().await?.notes() {
        out::say(format_args!("-- NOTE: {note}"))?;
    }
    Ok(migration.run().await?)
}
