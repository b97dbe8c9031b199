//! Messages between replicas about the proxies that are connected to them. The replica that writes
//! conditions knows all pods by them. Pure.
//!
//! A page of it is a part of each report of a replica. With many objects, the pages follow each other.

use std::collections::BTreeMap;
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use crate::index::outcome::{Progress, Subject};

/// The length of a page. A report is an annotation.
const MAX_PAGE_BYTES: usize = 64 * 1024;

/// The findings of a review, with the generations of the objects.
type Found = BTreeMap<Subject, (i64, Progress)>;

/// The findings of one replica about the objects in a range.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Page {
    /// The first one. `None`: the first of all.
    from: Option<Subject>,
    /// The first one after them. `None`: there is none.
    to: Option<Subject>,
    found: Vec<(Subject, i64, Progress)>,
}

impl Page {
    fn covers(&self, subject: &Subject) -> bool {
        let is_before = self.from.as_ref().is_some_and(|from| subject < from);
        !is_before && self.to.as_ref().is_none_or(|to| subject < to)
    }
}

/// The findings that this replica sends, and the findings of the others.
#[derive(Debug, Default)]
pub struct Exchange {
    own: Found,
    /// Where the next page begins.
    next: Option<Subject>,
    others: BTreeMap<String, Found>,
}

impl Exchange {
    /// The next page of what this replica has found.
    pub fn page(&mut self) -> Page {
        let mut page = Page {
            from: self.next.take(),
            ..Page::default()
        };
        let from = page.from.as_ref().map_or(Bound::Unbounded, Bound::Included);
        let mut bytes = 0;
        for (subject, (generation, progress)) in self.own.range((from, Bound::Unbounded)) {
            let found = (subject.clone(), *generation, progress.clone());
            let length = serde_json::to_string(&found).map_or(0, |text| text.len());
            if bytes > 0 && bytes + length > MAX_PAGE_BYTES {
                page.to = Some(subject.clone());
                break;
            }
            bytes += length;
            page.found.push(found);
        }
        self.next = page.to.clone();
        page
    }

    /// Records the latest pages of all other live replicas.
    pub fn receive(&mut self, pages: BTreeMap<String, Page>) {
        self.others.retain(|replica, _| pages.contains_key(replica));
        for (replica, page) in pages {
            let found = self.others.entry(replica).or_default();
            found.retain(|subject, _| !page.covers(subject));
            let new = page.found.into_iter();
            found.extend(new.map(|(subject, generation, one)| (subject, (generation, one))));
        }
    }

    /// The findings of all replicas. If another replica knows another generation of an object, its
    /// pods have not acknowledged the generation of this replica.
    pub(crate) fn merge(&mut self, own: Found) -> Found {
        let mut all = own.clone();
        self.own = own;
        for (subject, (generation, other)) in self.others.values().flatten() {
            let new = || (*generation, Progress::default());
            let (known, progress) = all.entry(subject.clone()).or_insert_with(new);
            let namespace = &subject.key.namespace;
            if known == generation {
                progress.merge(namespace, other);
            } else {
                progress.merge(namespace, &other.outdated());
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::outcome::Outcome;
    use crate::kinds::policy::Target;
    use crate::object::{Key, Kind};

    fn subject(number: usize) -> Subject {
        let key = Key::new("shop", &format!("policy-{number:05}"));
        Subject {
            kind: [Kind::Authorization, Kind::HttpRoute][number % 2],
            target: Target::Service(key.clone()),
            key,
        }
    }

    fn found(numbers: impl Iterator<Item = usize>) -> Found {
        let pods = [Key::new("shop", "a"), Key::new("bank", "b")];
        let rejected = Outcome::Rejected("\u{0}\"why\"".into());
        let pods = || pods.iter().zip([&rejected, &Outcome::Applied]);
        let of = |number| (subject(number), (7, Progress::of("shop", pods())));
        numbers.map(of).collect()
    }

    /// The page as another replica reads it.
    fn sent(page: &Page) -> BTreeMap<String, Page> {
        let text = serde_json::to_string(page).unwrap();
        assert!(text.len() < MAX_PAGE_BYTES + 1024, "{} bytes", text.len());
        [("other".to_owned(), serde_json::from_str(&text).unwrap())].into()
    }

    #[test]
    fn pages_of_many_objects_follow_each_other_and_replace_earlier_ones() {
        let (mut one, mut other) = (Exchange::default(), Exchange::default());
        let all = found(0..5000);
        one.merge(all.clone());
        let mut pages = 0;
        loop {
            let page = one.page();
            other.receive(sent(&page));
            pages += 1;
            if page.to.is_none() {
                break;
            }
        }
        assert!(pages > 3, "{pages}");
        assert_eq!(other.merge(Found::new()), all);
        let left = found((0..5000).filter(|number| number % 3 > 0));
        one.merge(left.clone());
        (0..pages).for_each(|_| other.receive(sent(&one.page())));
        assert_eq!(other.merge(Found::new()), left);
        other.receive(BTreeMap::new());
        assert_eq!(other.merge(Found::new()), Found::new(), "it has stopped");
    }

    #[test]
    fn page_of_another_release_that_cannot_be_read_is_empty() {
        let page = serde_json::json!({"found": [[["Later", ["a", "b"], ["a", ""]], 1, {}]]});
        assert!(Page::deserialize(page).is_err());
        let (mut one, target) = (Exchange::default(), Target::Namespace("shop".into()));
        let subject = Subject {
            target,
            ..subject(0)
        };
        one.merge([(subject.clone(), (1, Progress::default()))].into());
        let page = &sent(&one.page())["other"];
        assert_eq!(page.found[0].0, subject);
    }
}
