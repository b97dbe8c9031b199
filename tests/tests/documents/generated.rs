//! The parts of documents that are generated from the code: between `<!-- KIND: NAME -->` and
//! `<!-- end -->`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use diy_mesh_tests::repository::{read, root};

const END: &str = "<!-- end -->\n";

/// Checks that a document has these parts of a kind, by their names. UPDATE_DOCUMENTS=1 writes them.
pub fn assert_generated(document: &str, kind: &str, texts: &BTreeMap<String, String>) {
    let written = read(Path::new(document));
    let begin = format!("<!-- {kind}: ");
    let mut parts = written.split(&begin);
    let mut current = parts.next().unwrap_or_default().to_owned();
    let mut shown = BTreeSet::new();
    for part in parts {
        let (name, rest) = part.split_once(" -->\n").expect("the part has a name");
        let (_, rest) = rest.split_once(END).expect("the part has an end");
        let text = texts.get(name);
        let text = text.unwrap_or_else(|| panic!("{document}: there are no {kind} of {name}"));
        current += &format!("{begin}{name} -->\n{text}{END}{rest}");
        shown.insert(name.to_owned());
    }
    let expected: BTreeSet<_> = texts.keys().cloned().collect();
    assert_eq!(shown, expected, "the {kind} of {document}");
    if std::env::var_os("UPDATE_DOCUMENTS").is_some() {
        std::fs::write(root().join(document), &current).expect("the document can be written");
    } else {
        let [removed, added] = [(&written, &current), (&current, &written)].map(|(of, other)| {
            let other: BTreeSet<&str> = other.lines().collect();
            let lines = of.lines().filter(|line| !other.contains(line));
            lines.collect::<Vec<_>>().join("\n")
        });
        assert!(
            written == current,
            "{document} differs from the code: run UPDATE_DOCUMENTS=1 cargo test -p diy-mesh-tests \
             --test documents\nit has:\n{removed}\nexpected:\n{added}"
        );
    }
}
