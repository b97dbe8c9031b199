//! The memory of routes, without what the allocator adds. Pure.

use get_size2::{GetSize, GetSizeTracker};

use prost::Message;

use super::fault::Fault;
use super::matching::{FieldMatch, Index, Match, Matches, PathMatch, Positions, ValueMatch};
use super::{BackendRef, Changes, RetryPolicy, RouteBackend, Routes, Rule};
use crate::endpoint::{ExternalHost, ServerTls};
use crate::http::fields::FieldEdit;

/// The memory of a configuration of TLS and its sessions, with the public certificate authorities.
const CLIENT_CONFIG: usize = 32 * 1024;

/// Sums the fields that have memory of their own, and the lists and options of messages.
macro_rules! sum_of_fields {
    ($($type:ident { $($field:ident),+ $(; $($message:ident),+)? })+) => {
        $(impl GetSize for $type {
            fn get_heap_size_with_tracker<T: GetSizeTracker>(&self, tracker: T) -> (usize, T) {
                let sum = 0;
                $($(let sum = sum + self.$message.iter().map(message).sum::<usize>();)+)?
                $(
                    let (size, tracker) = self.$field.get_heap_size_with_tracker(tracker);
                    let sum = sum + size;
                )+
                (sum, tracker)
            }
        })+
    };
}

/// The memory of a message, with its texts.
fn message<M: Message>(message: &M) -> usize {
    size_of::<M>() + message.encoded_len()
}

sum_of_fields! {
    Routes { matches, rules, tcp, faults, rejection }
    Index { exact, prefixes, lengths, others }
    Positions { by_header, others }
    Rule { name, backends, changes, retry; redirect, cors, session }
    RouteBackend { to, changes }
    ExternalHost { name, host, tls }
    Changes { request, response; rewrite, mirrors }
    RetryPolicy { statuses }
    Fault { name, matches }
}

/// Sums what each variant has.
macro_rules! size_of_variants {
    ($($type:ident { $($pattern:pat => $size:expr),+ $(,)? })+) => {
        $(impl GetSize for $type {
            fn get_heap_size_with_tracker<T: GetSizeTracker>(&self, tracker: T) -> (usize, T) {
                let size = match self {
                    $($pattern => $size),+
                };
                (size, tracker)
            }
        })+
    };
}

impl GetSize for Matches {
    fn get_heap_size_with_tracker<T: GetSizeTracker>(&self, tracker: T) -> (usize, T) {
        let matches: usize = self.matches.iter().map(of_match).sum();
        let (index, tracker) = self.index.get_heap_size_with_tracker(tracker);
        (matches + index, tracker)
    }
}

fn of_match(one: &Match) -> usize {
    let path = one.path.as_ref().map_or(0, |path| match path {
        PathMatch::Exact(path) | PathMatch::Prefix(path) => path.capacity(),
        PathMatch::Regex(pattern) => pattern.max_size(),
    });
    let of_field = |field: &FieldMatch| {
        let value = match &field.value {
            ValueMatch::Exact(value) => value.capacity(),
            ValueMatch::Regex(pattern) => pattern.max_size(),
        };
        size_of::<FieldMatch>() + field.name.capacity() + value
    };
    let fields: usize = one.headers.iter().chain(&one.query).map(of_field).sum();
    let method = one.method.as_ref().map_or(0, String::capacity);
    size_of::<Match>() + path + fields + method
}

impl GetSize for BackendRef {
    fn get_heap_size_with_tracker<T: GetSizeTracker>(&self, tracker: T) -> (usize, T) {
        match self {
            Self::Service(name) => name.get_heap_size_with_tracker(tracker),
            Self::External(host) => host.get_heap_size_with_tracker(tracker),
        }
    }
}

/// With one configuration: most clients use one protocol. It has a copy of the roots.
impl GetSize for ServerTls {
    fn get_heap_size_with_tracker<T: GetSizeTracker>(&self, tracker: T) -> (usize, T) {
        let roots: usize = self.roots.iter().map(|root| root.len()).sum();
        let name = self.server_name.to_str().len();
        (name + 2 * roots + CLIENT_CONFIG, tracker)
    }
}

size_of_variants! {
    FieldEdit {
        Self::Set(name, value) | Self::Add(name, value) => name.capacity() + value.capacity(),
        Self::Remove(name) => name.capacity(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use diy_mesh_proto::pattern::Pattern;

    use super::*;

    #[test]
    fn what_is_shared_counts_once_and_what_is_copied_each_time() {
        let changes = || {
            let request = (0..100)
                .map(|_| FieldEdit::Remove("x".repeat(100)))
                .collect();
            Arc::new(Changes {
                request,
                ..Changes::default()
            })
        };
        let size = |backends: Vec<Arc<Changes>>| {
            let backend = |changes| RouteBackend {
                to: None,
                weight: 1,
                changes,
            };
            let rule = Rule {
                backends: backends.into_iter().map(backend).collect(),
                ..Rule::default()
            };
            Routes::new(vec![], vec![Arc::new(rule)]).measured().size()
        };
        let shared = changes();
        let once = size(vec![shared.clone(); 16]);
        assert!((15_000..20_000).contains(&once), "{once}");
        let copied = size((0..16).map(|_| changes()).collect());
        assert!((16 * 15_000..16 * 20_000).contains(&copied), "{copied}");
    }

    #[test]
    fn roots_of_a_host_count_once() {
        let host = Arc::new(ExternalHost {
            name: "XBackend shop/api".into(),
            host: "api.example.test".into(),
            port: 443,
            tls: Some(Arc::new(ServerTls {
                server_name: "api.example.test".try_into().unwrap(),
                roots: vec![vec![0; 30_000].into()],
                configs: Default::default(),
            })),
        });
        let backend = || RouteBackend {
            to: Some(BackendRef::External(host.clone())),
            weight: 1,
            changes: Arc::default(),
        };
        let rule = Rule {
            backends: vec![backend(), backend()],
            ..Rule::default()
        };
        let size = Routes::new(vec![], vec![Arc::new(rule)]).measured().size();
        assert!((90_000..95_000).contains(&size), "{size}");
    }

    #[test]
    fn expressions_and_the_index_count() {
        let regex = |text: &str| Match {
            path: Some(PathMatch::Regex(Pattern::parse(text).unwrap())),
            ..Match::default()
        };
        let size = |matches| Routes::new(matches, vec![]).measured().size();
        let small = size(vec![regex("/[0-9]+")]);
        assert!((2048..3000).contains(&small), "{small}");
        let large = size(vec![regex("/[a-z]{300}")]);
        assert!((64 * 1024..70_000).contains(&large), "{large}");
        let exact = |number: usize| Match {
            path: Some(PathMatch::Exact(number.to_string())),
            ..Match::default()
        };
        let many = size((0..1000).map(exact).collect());
        assert!(
            many > 1000 * (size_of::<Match>() + size_of::<Positions>()),
            "{many}"
        );
    }
}
