//! The checks of a small model: its properties hold, and each wrong design breaks one of them.

use std::{fmt::Debug, hash::Hash};

use libtest_mimic::{Failed, Trial};
use stateright::{Checker, Model};

/// Fewer states than this would mean that the model does nothing.
const FEWEST: usize = 1_000;

pub fn trials<M, Mutant>(
    name: &'static str,
    design: fn(Option<Mutant>) -> M,
    caught: impl IntoIterator<Item = (Mutant, &'static str)>,
) -> Vec<Trial>
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync, Action: Clone + Debug + PartialEq + Send + Sync>
        + Send
        + Sync
        + 'static,
    Mutant: Debug + Send + Copy + 'static,
{
    let mut trials = vec![holds(name, design)];
    trials.extend(caught.into_iter().map(|(mutant, property)| {
        Trial::test(format!("{name}::caught::{mutant:?}"), move || {
            let checker = design(Some(mutant)).checker().spawn_bfs().join();
            let path = checker.discovery(property).ok_or_else(|| format!("{mutant:?} keeps: {property}"))?;
            println!("{mutant:?} breaks \"{property}\": {:?}", path.into_actions());
            Ok(())
        })
    }));
    trials
}

fn holds<M, Mutant: 'static>(name: &'static str, design: fn(Option<Mutant>) -> M) -> Trial
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync, Action: Clone + Debug + PartialEq + Send + Sync>
        + Send
        + Sync
        + 'static,
{
    Trial::test(format!("{name}::holds"), move || {
        let model = design(None);
        let properties = model.properties();
        let checker = model.checker().spawn_bfs().join();
        println!("{name}: {} states", checker.unique_state_count());
        for property in properties {
            if let Some(path) = checker.discovery(property.name) {
                return Err(Failed::from(format!("{}: {:?}", property.name, path.into_actions())));
            }
        }
        if checker.unique_state_count() >= FEWEST { Ok(()) } else { Err("too few states".into()) }
    })
}
