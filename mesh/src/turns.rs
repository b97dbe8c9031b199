//! An order in which namespaces take turns, so that no namespace displaces the others. Pure.

use std::collections::BTreeMap;

/// The items in an order in which namespaces take turns.
pub(crate) fn in_turns<T>(items: impl IntoIterator<Item = (String, T)>) -> Vec<T> {
    let mut turns: BTreeMap<String, usize> = BTreeMap::new();
    let ranked = items.into_iter().map(|(namespace, item)| {
        let turn = turns.entry(namespace).or_default();
        *turn += 1;
        (*turn, item)
    });
    let mut ranked: Vec<(usize, T)> = ranked.collect();
    ranked.sort_by_key(|(turn, _)| *turn);
    ranked.into_iter().map(|(_, item)| item).collect()
}
