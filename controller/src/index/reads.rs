//! The values that a question reads in the index, and the questions that have read a changed value. Pure.
//!
//! Tables and links record each read themselves, also of an absent key and of a link without objects: a
//! question cannot forget one. Changes are named like reads. One thread answers a question, without a
//! pause, so that the reads are gathered in a variable of the thread. Istio's krt and the crate salsa
//! track dependencies in a similar way.

use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::{link, unlink};

thread_local! {
    /// The reads of the questions that this thread answers, the innermost question last.
    static QUESTIONS: RefCell<Vec<Vec<Read>>> = const { RefCell::new(Vec::new()) };
}

/// The digest of something that can be read. Two things with the same digest only cause answers that are
/// the same as before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Read(u64);

impl Read {
    /// The value of a key in a table.
    pub(super) fn of(table: &str, key: &(impl Hash + ?Sized)) -> Read {
        let mut hasher = DefaultHasher::new();
        (table, key).hash(&mut hasher);
        Read(hasher.finish())
    }
}

/// Records something for the innermost question of this thread, if there is one.
pub(super) fn record(read: impl FnOnce() -> Read) {
    QUESTIONS.with_borrow_mut(|questions| {
        if let Some(reads) = questions.last_mut() {
            reads.push(read());
        }
    });
}

/// Answers a question, and returns what it has read.
pub fn ask<T>(answer: impl FnOnce() -> T) -> (T, Reads) {
    /// Ends the question, after a panic too.
    struct Question;
    impl Drop for Question {
        fn drop(&mut self) {
            QUESTIONS.with_borrow_mut(|questions| drop(questions.pop()));
        }
    }
    QUESTIONS.with_borrow_mut(|questions| questions.push(Vec::new()));
    let question = Question;
    let answer = answer();
    let reads = QUESTIONS.with_borrow_mut(|questions| questions.last_mut().map(std::mem::take));
    drop(question);
    (answer, Reads::from(reads.unwrap_or_default()))
}

/// The values that a question has read, in order and without duplicates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reads(Box<[Read]>);

impl From<Vec<Read>> for Reads {
    fn from(mut reads: Vec<Read>) -> Reads {
        reads.sort_unstable();
        reads.dedup();
        Reads(reads.into())
    }
}

impl Reads {
    /// How many there are.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Adds what another question has read.
    pub fn add(&mut self, others: Reads) {
        if self.0.is_empty() {
            *self = others;
        } else if *self != others {
            *self = Reads::from([&self.0[..], &others.0[..]].concat());
        }
    }
}

/// The questions that have read something.
#[derive(Debug)]
pub struct Readers<Q> {
    reads: HashMap<Arc<Q>, Reads>,
    of: HashMap<Read, BTreeSet<Arc<Q>>>,
}

impl<Q> Default for Readers<Q> {
    fn default() -> Self {
        Readers {
            reads: HashMap::new(),
            of: HashMap::new(),
        }
    }
}

impl<Q: Ord + Hash> Readers<Q> {
    /// Replaces what a question has read.
    pub fn set(&mut self, question: &Arc<Q>, reads: Reads) {
        let before = self.reads.get(question);
        if before == Some(&reads) {
            return;
        }
        let none = Reads::default();
        let before = before.unwrap_or(&none);
        let added = reads
            .0
            .iter()
            .filter(|read| before.0.binary_search(read).is_err());
        let removed = before
            .0
            .iter()
            .filter(|read| reads.0.binary_search(read).is_err());
        removed.for_each(|read| unlink(&mut self.of, read, question));
        added.for_each(|read| link(&mut self.of, read, question));
        self.reads.insert(question.clone(), reads);
    }

    /// Adds to what a question has read.
    pub fn add(&mut self, question: &Arc<Q>, reads: Reads) {
        let mut all = self.reads.get(question).cloned().unwrap_or_default();
        all.add(reads);
        self.set(question, all);
    }

    /// Forgets a question.
    pub fn remove(&mut self, question: &Q) {
        if let Some((question, reads)) = self.reads.remove_entry(question) {
            let reads = reads.0.iter();
            reads.for_each(|read| unlink(&mut self.of, read, &question));
        }
    }

    /// The questions that have read any of these.
    pub fn of<'a>(&self, changed: impl IntoIterator<Item = &'a Read>) -> BTreeSet<Arc<Q>> {
        let questions = changed.into_iter().filter_map(|read| self.of.get(read));
        questions.flatten().cloned().collect()
    }

    /// Whether no question is known.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.of.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(keys: &[&str]) -> Reads {
        let read = |key| Read::of("test", key);
        Reads::from(Vec::from_iter(keys.iter().map(read)))
    }

    fn stale(readers: &Readers<&'static str>, key: &str) -> Vec<&'static str> {
        let stale = readers.of(&[Read::of("test", key)]);
        stale.iter().map(|question| **question).collect()
    }

    #[test]
    fn questions_record_what_they_read_and_not_what_others_read() {
        let read = |key: &str| record(|| Read::of("test", key));
        read("nobody");
        let ((inner, own), outer) = ask(|| {
            read("a");
            let inner = ask(|| read("b")).1;
            let failed = std::panic::catch_unwind(|| ask(|| panic!("an answer fails")));
            assert!(failed.is_err());
            read("c");
            read("a");
            (inner, ())
        });
        assert_eq!((inner, outer, own), (reads(&["b"]), reads(&["a", "c"]), ()));
    }

    #[test]
    fn changes_concern_the_questions_that_have_read_what_changes() {
        let mut readers = Readers::default();
        let [one, other] = ["one", "other"].map(Arc::new);
        readers.set(&one, reads(&["a", "b"]));
        readers.set(&other, reads(&["b"]));
        assert_eq!(stale(&readers, "b"), ["one", "other"]);
        readers.set(&one, reads(&["a", "c"]));
        assert_eq!(
            (stale(&readers, "b"), stale(&readers, "c")),
            (vec!["other"], vec!["one"])
        );
        readers.add(&other, reads(&["d"]));
        assert_eq!(
            (stale(&readers, "b"), stale(&readers, "d")),
            (vec!["other"], vec!["other"])
        );
        readers.remove(&"one");
        readers.remove(&"other");
        assert!(readers.is_empty());
    }
}
