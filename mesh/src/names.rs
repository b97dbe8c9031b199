//! The names of generated objects. Pure.

use std::collections::BTreeSet;

/// A name that no object of the namespace has yet, which is added to `names`.
pub(crate) fn unique(
    name: &str,
    namespace: &str,
    names: &mut BTreeSet<(String, String)>,
) -> String {
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    let mut candidates = std::iter::once(name.to_owned()).chain(numbered);
    let is_new = |name: &String| names.insert((namespace.to_owned(), name.clone()));
    candidates
        .find(is_new)
        .expect("there is always another number")
}
