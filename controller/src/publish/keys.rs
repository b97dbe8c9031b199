//! The keys of issuers: what is to be fetched, for which policies, and what was fetched.

pub(crate) mod schedule;

use std::sync::{Arc, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::Hub;
use super::keys::schedule::Schedule;
use crate::object::issuer_keys::Source;
use crate::object::{ObjectId, PodRef};

impl Hub {
    /// Begins the attempts to fetch keys that are due, each with a namespace that needs them. Forgets
    /// what no policy needs.
    pub fn begin_fetches(&self, now: Instant) -> Vec<(Arc<str>, Source)> {
        let index = self.index();
        let sources = index.key_sources();
        let (due, refused) = self.fetches().begin(sources, now);
        let policies = refused.iter().flat_map(|source| sources.policies(source));
        let policies: Vec<ObjectId> = policies.collect();
        drop(index);
        if !policies.is_empty() {
            self.changed_statuses
                .send_modify(|all| all.extend(policies));
        }
        due
    }

    /// Records the result of an attempt to fetch keys, for the statuses of the policies that need
    /// them. Returns whether it differs from the one before.
    pub fn end_fetch(&self, source: &Source, result: Result<String, String>, now: Instant) -> bool {
        let is_changed = self.fetches().end(source, result, now);
        if is_changed {
            let policies: Vec<_> = self.index().key_sources().policies(source).collect();
            self.changed_statuses
                .send_modify(|all| all.extend(policies));
        }
        is_changed
    }

    /// The proxy of a pod has met tokens with unknown keys of these issuers. Only those in its own
    /// policies count.
    pub fn report_unknown_keys(&self, pod: &PodRef, issuers: &[String], now: Instant) {
        let urls = self.index().key_urls(pod, issuers);
        let mut fetches = self.fetches();
        urls.iter().for_each(|url| fetches.report(url, now));
    }

    /// The URLs whose keys proxies of this replica lack, for the other replicas.
    pub fn unknown_keys(&self, now: Instant) -> Vec<String> {
        self.fetches().reported(now)
    }

    /// Other replicas have told that their proxies lack the keys of these URLs.
    pub fn receive_unknown_keys(&self, urls: impl IntoIterator<Item = String>) {
        let mut fetches = self.fetches();
        for url in urls {
            fetches.request(&Source::Url(url));
        }
    }

    pub(super) fn fetches(&self) -> MutexGuard<'_, Schedule> {
        self.fetches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::catalog::Change;
    use crate::index::authorization::MAX_SOURCES;
    use crate::index::tests::pod;
    use crate::kinds::authorization::tests::policy;
    use crate::kinds::{Object, Pod};
    use crate::object::{Key, Kind};
    use crate::status::statuses::Statuses;

    /// A policy for all pods of a namespace, with an issuer whose keys are there.
    fn issuing(namespace: &str, issuer: &str, keys: Value) -> Change {
        let issuer = json!({"issuer": issuer, "audiences": ["shop"], "keys": keys});
        let spec = json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "action": "ALLOW",
            "issuers": [issuer], "rules": [{}]});
        let policy = policy(namespace, "p", &spec);
        assert_eq!(policy.rejection(), None);
        Change::Apply(Object::Authorization(policy))
    }

    fn pod_in(namespace: &str) -> Change {
        Change::Apply(Object::Pod(Pod {
            key: Key::new(namespace, "a"),
            uid: "1".into(),
            ..pod("a", &[])
        }))
    }

    fn reference(namespace: &str, uid: &str) -> PodRef {
        PodRef {
            namespace: namespace.into(),
            name: "a".into(),
            uid: uid.into(),
        }
    }

    /// A replica that has fetched all keys.
    fn replica(now: Instant) -> Hub {
        let hub = Hub::default();
        let url = |url: &str| json!({"type": "URL", "url": url});
        let secret = json!({"type": "Secret", "secret": {"name": "idp", "key": "jwks"}});
        hub.apply([
            pod_in("shop"),
            pod_in("bank"),
            pod_in("cafe"),
            issuing("shop", "https://shop", url("https://shop/keys")),
            issuing("bank", "https://bank", url("https://bank/keys")),
            issuing("cafe", "https://cafe", secret),
        ]);
        let sources = hub.begin_fetches(now);
        assert_eq!(sources.len(), 3);
        for (_, source) in sources {
            hub.end_fetch(&source, Ok(String::new()), now);
        }
        hub
    }

    #[test]
    fn proxies_report_only_issuers_with_a_url_in_the_policies_of_their_pod() {
        let issuers = ["https://shop", "https://bank", "https://cafe", "https://x"];
        let issuers = issuers.map(str::to_owned);
        for (pod, expected) in [
            (reference("shop", "1"), &["https://shop/keys"][..]),
            (reference("bank", "1"), &["https://bank/keys"]),
            (reference("cafe", "1"), &[]),
            (reference("shop", "2"), &[]),
            (reference("other", "1"), &[]),
        ] {
            let start = Instant::now();
            let hub = replica(start);
            hub.report_unknown_keys(&pod, &issuers[1..1], start);
            assert_eq!(hub.unknown_keys(start), [""; 0]);
            hub.report_unknown_keys(&pod, &issuers, start);
            assert_eq!(hub.unknown_keys(start), expected, "{pod:?}");
            assert_eq!(hub.begin_fetches(start), []);
            let due = hub.begin_fetches(start + Duration::from_secs(10));
            let urls = expected.iter().map(|url| Source::Url(url.to_string()));
            let due = due.into_iter().map(|(_, source)| source);
            assert_eq!(Vec::from_iter(due), Vec::from_iter(urls), "{pod:?}");
        }
    }

    #[test]
    fn other_replicas_fetch_too_and_do_not_pass_the_report_on() {
        let start = Instant::now();
        let (hub, other) = (replica(start), replica(start));
        let issuers = ["https://shop".to_owned()];
        hub.report_unknown_keys(&reference("shop", "1"), &issuers, start);
        let unknown = ["https://elsewhere/keys".to_owned()].into_iter();
        other.receive_unknown_keys(hub.unknown_keys(start).into_iter().chain(unknown));
        assert_eq!(other.unknown_keys(start), [""; 0]);
        let due = other.begin_fetches(start + Duration::from_secs(10));
        let expected = Source::Url("https://shop/keys".to_owned());
        assert_eq!(due, [("shop".into(), expected)]);
    }

    #[test]
    fn sources_over_the_limit_of_a_namespace_are_not_fetched_and_its_policies_say_so() {
        let (hub, start) = (Hub::default(), Instant::now());
        let secret = |key: usize| json!({"type": "Secret", "secret": {"name": "idp", "key": format!("k{key:03}")}});
        let issuing = |namespace: &str, number: usize| {
            let issuer =
                json!({"issuer": "https://id", "audiences": ["a"], "keys": secret(number)});
            let spec = json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "action": "ALLOW",
                "issuers": [issuer], "rules": [{}]});
            let policy = policy(namespace, &format!("p{number}"), &spec);
            Change::Apply(Object::Authorization(policy))
        };
        hub.apply((0..100).map(|number| issuing("hostile", number)));
        hub.apply([issuing("shop", 1)]);
        let due = hub.begin_fetches(start);
        assert_eq!(due.len(), MAX_SOURCES + 1);
        let message = |number: usize| {
            let id = (
                Kind::Authorization,
                Key::new("hostile", &format!("p{number}")),
            );
            let status = hub.get(&id).unwrap().unwrap();
            status.issuers[0].1.message.clone()
        };
        let last = message(99).unwrap();
        assert!(last.contains("more than 64"), "{last}");
        assert_eq!(message(0), None);
        // Without the first ones, the next ones are within the limit.
        for (_, source) in due {
            hub.end_fetch(&source, Ok(String::new()), start);
        }
        let deleted = (0..40).map(|number| Key::new("hostile", &format!("p{number}")));
        hub.apply(deleted.map(|key| Change::Delete(Kind::Authorization, key)));
        assert_eq!(hub.begin_fetches(start).len(), 36);
    }
}
