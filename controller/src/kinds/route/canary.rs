//! Canaries: Services with annotations that request a share of the requests of another one. Pure.
//!
//! A canary with invalid annotations gets no requests. It does not concern the others.

use std::sync::Arc;

use super::model::{Match, ParsedRule, Reference, Route};
use super::parse::{REFERENCE_BYTES, RULE_BYTES};
use super::{CONFLICTED, NO_MATCHING_PARENT};
use crate::kinds::Service;
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::{Key, Kind, Meta, Rejection, TargetReference};

const ALL_PERCENT: u32 = 100;
/// The maximum number of canaries of one Service. Canaries with 0% count.
const MAX_CANARIES: usize = 64;

/// The canaries of a Service.
#[derive(Debug, Default, PartialEq)]
pub struct Canaries {
    /// Their names and shares in percent.
    pub accepted: Vec<(Key, u32)>,
    /// Why others get no requests.
    pub rejected: Vec<(Key, Rejection)>,
}

impl Canaries {
    /// All Services with the annotation.
    pub fn services(&self) -> impl Iterator<Item = &Key> {
        let accepted = self.accepted.iter().map(|(key, _)| key);
        accepted.chain(self.rejected.iter().map(|(key, _)| key))
    }

    /// Why a Service is no canary.
    pub fn rejection(&self, service: &Key) -> Option<&Rejection> {
        let mut rejected = self.rejected.iter();
        rejected.find_map(|(key, rejection)| (key == service).then_some(rejection))
    }

    /// Checks the annotations of these Services, which name the Service `key`. The oldest ones have
    /// precedence.
    pub fn new(key: &Key, primary: Option<&Service>, mut canaries: Vec<&Service>) -> Canaries {
        canaries.sort_by_key(|service| (service.created, &service.key));
        let (mut all, mut sum) = (Canaries::default(), 0);
        for service in canaries {
            match share(key, primary, service, sum, all.accepted.len()) {
                Ok(percent) => {
                    sum += percent;
                    all.accepted.push((service.key.clone(), percent));
                }
                Err(rejection) => all.rejected.push((service.key.clone(), rejection)),
            }
        }
        all
    }

    /// The route for all requests to the Service `key`, if it has canaries.
    pub fn route(&self, key: &Key) -> Option<Route> {
        let sum: u32 = self.accepted.iter().map(|(_, percent)| percent).sum();
        let backend = |(key, weight): (&Key, u32)| {
            let reference = Reference::service(key.clone(), format!("canary {key}"));
            (reference, weight)
        };
        let canaries = self.accepted.iter().map(|(key, percent)| (key, *percent));
        let backends = [(key, ALL_PERCENT - sum)].into_iter().chain(canaries);
        let matches = vec![Arc::new(Match::default())];
        let name = format!("canaries of {key}");
        let rule = ParsedRule::new(matches, name, backends.map(backend).collect());
        let bytes = RULE_BYTES + rule.references.len() * REFERENCE_BYTES;
        let meta = Meta {
            kind: Kind::Service,
            key: key.clone(),
            created: 0,
            uid: "".into(),
            generation: 0,
            bytes,
            dropped: None,
        };
        let route = || {
            Route::new(
                meta,
                vec![TargetReference::service(&key.name)],
                Ok(vec![Arc::new(rule)]),
            )
        };
        (!self.accepted.is_empty()).then(route)
    }
}

/// The share of a canary in percent. The `older` ones have `sum` already.
fn share(
    key: &Key,
    primary: Option<&Service>,
    canary: &Service,
    sum: u32,
    older: usize,
) -> Result<u32, Rejection> {
    let rejected = |reason, message| Err(Rejection::new(reason, message));
    let percent = match &canary.canary {
        Some(canary) => canary.content.clone()?,
        None => 0,
    };
    let Some(primary) = primary else {
        let message = format!("the Service {key} does not exist");
        return rejected(NO_MATCHING_PARENT, message);
    };
    if canary.key == *key {
        let message = format!("the Service {key} cannot be a canary of itself");
        return rejected(UNSUPPORTED_VALUE, message);
    }
    if primary.canary.is_some() {
        let message = format!("the Service {key} is a canary itself; expected one that is not");
        return rejected(UNSUPPORTED_VALUE, message);
    }
    if older >= MAX_CANARIES {
        let message = format!("the Service {key} has {MAX_CANARIES} older canaries, the maximum");
        return rejected(CONFLICTED, message);
    }
    if sum + percent > ALL_PERCENT {
        let message = format!(
            "with {percent}%, the canaries of {key} would have more than 100%: older ones have \
             {sum}%"
        );
        return rejected(CONFLICTED, message);
    }
    Ok(percent)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use diy_mesh_proto::mesh::v1::RouteBackend;
    use diy_mesh_proto::mesh::v1::service::Canary;
    use serde_json::json;

    use super::*;
    use crate::index::locality::Location;
    use crate::index::tests::{index, key, service};
    use crate::index::{Index, Resource};
    use crate::kinds::Object;
    use crate::kinds::route::tests::route;
    use crate::kinds::service::ServicePort;

    /// A canary of Service shop/`of`, created at a time.
    fn canary(name: &str, of: &str, weight: Result<u32, &str>, created: i64) -> Service {
        Service {
            canary: Some(Box::new(crate::index::tests::canary(of, weight))),
            created,
            ..service(name, &["10.96.0.9"])
        }
    }

    fn web() -> Service {
        service("web", &["10.96.0.7"])
    }

    /// The backends at a port of Service shop/web, with their weights.
    fn backends(index: &Index, port: u16) -> String {
        let web = SocketAddr::new([10, 96, 0, 7].into(), port);
        let web = Resource::Destination(web);
        let target = index.resolve(&web, &Location::default()).1.target;
        let table = target.and_then(|target| target.routes);
        let rules = table.iter().flat_map(|table| &table.rules);
        let backends = rules.flat_map(|rule| rule.message().backends);
        let say = |backend: RouteBackend| format!("{}={}", backend.name, backend.weight);
        backends.map(say).collect::<Vec<_>>().join(" ")
    }

    /// The conditions of Services that do not hold.
    fn problems(index: &Index) -> Vec<String> {
        let all = index.route_statuses();
        let all = all.iter().filter(|status| status.kind == Kind::Service);
        let problems = all.flat_map(|status| {
            let conditions = status.parents.iter().flat_map(|parent| &parent.conditions);
            let failed = conditions.filter(|condition| !condition.holds);
            failed.map(|one| format!("{}: {} {}", status.key.name, one.reason, one.message))
        });
        problems.collect()
    }

    fn canaries(index: &Index) -> Vec<(Key, u32)> {
        let canaries = index.service(&key("web")).unwrap().canaries.into_iter();
        let canary = |one: Canary| (key(&one.name), u32::try_from(one.weight).unwrap());
        canaries.map(canary).collect()
    }

    #[test]
    fn canaries_get_their_shares_and_the_service_the_rest() {
        let index = index(
            [
                canary("new", "web", Ok(10), 1),
                canary("newer", "web", Ok(25), 2),
                web(),
            ]
            .map(Object::Service),
        );
        let expected = "shop/web:80=65 shop/new:80=10 shop/newer:80=25";
        assert_eq!(backends(&index, 80), expected);
        assert_eq!(canaries(&index), [(key("new"), 10), (key("newer"), 25)]);
        assert_eq!(problems(&index), [""; 0]);
    }

    #[test]
    fn share_of_a_port_that_the_canary_does_not_have_stays_with_the_service() {
        let mut one_port = canary("new", "web", Ok(10), 1);
        one_port.ports.retain(|port| port.port == 80);
        let objects = [one_port, canary("newer", "web", Ok(25), 2), web()];
        let index = index(objects.map(Object::Service));
        assert_eq!(
            backends(&index, 9000),
            "shop/web:9000=65 shop/web:9000=10 shop/newer:9000=25"
        );
        let problem = "BackendNotFound canary shop/new: the Service shop/new has no TCP port 9000";
        assert_eq!(
            problems(&index),
            [format!("new: {problem}"), format!("newer: {problem}")]
        );
    }

    #[test]
    fn limits_hold_for_canaries_without_a_share_and_for_many_ports() {
        let all = (0..200).map(|at| canary(&format!("c{at:03}"), "web", Ok(0), at));
        let one = index(all.clone().chain([web()]).map(Object::Service));
        assert_eq!(canaries(&one).len(), 64);
        let expected = "c064: Conflicted the Service shop/web has 64 older canaries, the maximum";
        assert_eq!(problems(&one)[0], expected);
        // At each port, the table has all of these backends.
        let mut primary = web();
        let port = primary.ports[0].clone();
        primary.ports = (1..=1000)
            .map(|number| ServicePort {
                port: number,
                ..port.clone()
            })
            .collect();
        let one = index(all.chain([primary]).map(Object::Service));
        assert_eq!((backends(&one, 1), canaries(&one)), ("".to_owned(), vec![]));
        let problem = &problems(&one)[0];
        assert!(problem.contains("1048576 bytes"), "{problem}");
    }

    #[test]
    fn invalid_canaries_are_reported_and_do_not_concern_others() {
        let headless = service("pods", &[]);
        let objects = [
            web(),
            headless,
            canary("good", "web", Ok(40), 1),
            canary("value", "web", Err("canary-weight: \"101\" is ..."), 2),
            canary("too-much", "web", Ok(61), 3),
            canary("fits", "web", Ok(60), 4),
            canary("self", "self", Ok(1), 5),
            canary("chain", "good", Ok(1), 6),
            canary("lost", "none", Ok(1), 7),
            canary("of-pods", "pods", Ok(1), 8),
        ];
        let index = index(objects.map(Object::Service));
        let expected = "shop/web:80=0 shop/good:80=40 shop/fits:80=60";
        assert_eq!(backends(&index, 80), expected);
        let expected = [
            "chain: UnsupportedValue the Service shop/good is a canary itself; expected one that is not",
            "lost: NoMatchingParent the Service shop/none does not exist",
            "of-pods: UnsupportedValue the Service shop/pods is headless: its clients select the pods",
            "self: UnsupportedValue the Service shop/self cannot be a canary of itself",
            "too-much: Conflicted with 61%, the canaries of shop/web would have more than 100%: older ones have 40%",
            "value: UnsupportedValue canary-weight: \"101\" is ...",
        ];
        assert_eq!(problems(&index), expected);
    }

    #[test]
    fn routes_of_the_gateway_api_take_precedence_over_canaries() {
        let objects = [
            Object::Route(route("r", 9, json!([{"backendRefs": []}]))),
            Object::Service(canary("new", "web", Ok(10), 1)),
            Object::Service(web()),
        ];
        let index = index(objects);
        assert_eq!(backends(&index, 80), "");
        assert_eq!(canaries(&index), []);
        let expected = "new: Conflicted HTTPRoute objects apply to shop/web, which exclude the \
                        canaries of Services";
        assert_eq!(problems(&index), [expected]);
    }
}
