//! Invalid changes of routes and policies: what stays in force, what their authors are told, and
//! what a replica that starts later knows.

use serde_json::{Value, json};

use super::*;
use crate::catalog;
use crate::index::locality::Location;
use crate::index::object::{Change, Resource};
use crate::index::tests::{empty, service, stored};
use crate::policy;
use crate::routes::model::Grant;
use crate::routes::parse::{self, Meta};

const UID: &str = "5d1c";

/// Services `web` and `api`.
fn services() -> Index {
    let mut index = empty();
    for (name, ip) in [("web", "10.96.0.7"), ("api", "10.96.0.8")] {
        apply(&mut index, Object::Service(service(name, &[ip])));
    }
    index
}

fn apply(index: &mut Index, object: Object) {
    change(index, Change::Apply(STORED, object));
}

fn change(index: &mut Index, change: Change) {
    index.apply(change, &mut Touched::default());
}

/// What the writer of ControllerRevisions does.
fn store(index: &mut Index) -> Vec<Change> {
    let changes = stored(index);
    for one in changes.clone() {
        change(index, one);
    }
    changes
}

/// The spec of a route for the Service `parent`: a rule for each of the paths.
fn spec(parent: &str, paths: &[&str]) -> Value {
    let rules = paths.iter().map(|path| {
        let value = json!({"type": "RegularExpression", "value": path});
        json!({"matches": [{"path": value}]})
    });
    json!({
        "parentRefs": [{"group": "", "kind": "Service", "name": parent}],
        "rules": rules.collect::<Vec<_>>(),
    })
}

fn parsed(name: &str, state: (&str, i64), spec: &Value) -> Object {
    let meta = Meta::new(Kind::HttpRoute, Key::new("shop", name), 0, state, spec);
    Object::Route(parse::route(meta, spec).unwrap())
}

/// A state of HTTPRoute shop/r.
fn state(uid: &str, generation: i64, parent: &str, paths: &[&str]) -> Object {
    parsed("r", (uid, generation), &spec(parent, paths))
}

/// A state of an HTTPRoute with content that has no effect.
fn padded(name: &str, uid: &str, generation: i64, path: &str, padding: &str) -> Object {
    let mut spec = spec("web", &[path]);
    spec["padding"] = padding.into();
    parsed(name, (uid, generation), &spec)
}

fn route(generation: i64, paths: &[&str]) -> Object {
    state(UID, generation, "web", paths)
}

fn policy(generation: i64, sections: Value) -> Object {
    let mut spec = json!({"targetRefs": [{"kind": "Service", "name": "web"}]});
    let sections = sections.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(sections);
    let key = Key::new("shop", "p");
    let meta = Meta::new(Kind::TrafficPolicy, key, 0, (UID, generation), &spec);
    Object::Policy(policy::parse::policy(meta, &spec).unwrap())
}

/// The paths of the rules in force at the port 80 of a Service.
fn paths(index: &Index, last: u8) -> Vec<String> {
    let destination = Resource::Destination(([10, 96, 0, last], 80).into());
    let (_, state) = index.resolve(&destination, &Location::default());
    let routes = state.target.unwrap().routes;
    let matches = routes.iter().flat_map(|table| &table.matches);
    matches.map(|(_, one)| format!("{:?}", one.path)).collect()
}

fn in_force(path: &str) -> Vec<String> {
    vec![format!("Some(Regex({path:?}))")]
}

/// The conditions of all routes and policies.
fn conditions(index: &Index) -> Vec<String> {
    let statuses = index.route_statuses();
    let parents = statuses.iter().flat_map(|status| &status.parents);
    let conditions = parents.flat_map(|parent| {
        let name = &parent.parent.name;
        let conditions = parent.conditions.iter();
        let conditions = conditions.filter(|one| one.kind != "ResolvedRefs");
        conditions.map(move |one| {
            let (kind, holds, message) = (one.kind, one.holds, &one.message);
            format!("{name} {kind}={holds} {:?} {message}", one.generation)
        })
    });
    conditions.collect()
}

const PROBLEM: &str = "spec.rules[0].matches[0].path.value: \"(\" is not a regular expression: found \
                       open group without closing ')'";

#[test]
fn invalid_change_leaves_the_last_valid_state_in_force_until_the_next_valid_one() {
    let mut index = services();
    apply(&mut index, route(1, &["("]));
    assert_eq!(paths(&index, 7), [""; 0], "there is no valid state");
    let rejected = format!("web Accepted=false None {PROBLEM}");
    assert_eq!(conditions(&index), [rejected]);
    apply(&mut index, route(2, &["/two"]));
    assert_eq!(store(&mut index), [], "valid objects need no copy");
    for generation in [3, 4] {
        apply(&mut index, route(generation, &["("]));
        assert_eq!(paths(&index, 7), in_force("/two"));
        let expected = format!("web Accepted=false None {PROBLEM}; generation 2 stays in force");
        assert_eq!(conditions(&index), [expected]);
        assert_eq!(store(&mut index).len(), usize::from(generation == 3));
        assert_eq!(index.route_statuses()[0].generation, generation);
    }
    apply(&mut index, route(5, &["/five"]));
    assert_eq!(paths(&index, 7), in_force("/five"));
    assert_eq!(
        conditions(&index),
        ["web Accepted=true None the route applies to shop/web"]
    );
    let [Change::Delete(_, Kind::Revision, key)] = &store(&mut index)[..] else {
        panic!("the copy is obsolete")
    };
    assert_eq!(&*key.name, "httproute-5d1c-2");
    assert_eq!(index.count(Kind::Revision), 0);
}

/// Gateway API, `RouteConditionPartiallyInvalid`.
#[test]
fn route_with_valid_and_invalid_rules_is_partially_invalid() {
    let mut index = services();
    apply(&mut index, route(1, &["(", "/b"]));
    let expected = format!("web Accepted=false None {PROBLEM}");
    assert_eq!(conditions(&index), [expected], "nothing to fall back to");
    apply(&mut index, route(2, &["/two"]));
    apply(&mut index, route(3, &["(", "/b"]));
    assert_eq!(paths(&index, 7), in_force("/two"));
    let partial = format!("web PartiallyInvalid=true None Fall Back to generation 2: {PROBLEM}");
    let accepted = "web Accepted=true Some(2) the route applies to shop/web".to_owned();
    assert_eq!(conditions(&index), [accepted, partial]);
}

#[test]
fn replica_that_starts_later_restores_the_state_in_any_order_of_events() {
    let mut first = services();
    apply(&mut first, route(2, &["/two"]));
    apply(
        &mut first,
        policy(6, json!({"timeouts": {"request": "1s"}})),
    );
    let invalid = [
        route(3, &["("]),
        policy(7, json!({"timeouts": {"request": "soon"}})),
    ];
    for object in invalid.clone() {
        apply(&mut first, object);
    }
    let revisions = store(&mut first);
    assert_eq!(revisions.len(), 2);
    let invalid = invalid.map(|object| Change::Apply(STORED, object)).to_vec();
    for order in [[invalid.clone(), revisions.clone()], [revisions, invalid]] {
        let mut second = services();
        for one in order.concat() {
            change(&mut second, one);
        }
        assert_eq!(paths(&second, 7), in_force("/two"));
        assert_eq!(conditions(&second), conditions(&first));
        let web = Key::new("shop", "web");
        assert!(second.policies.requests(&web).is_some());
        assert_eq!(
            second.policies.requests(&web),
            first.policies.requests(&web)
        );
        assert_eq!(store(&mut second), []);
    }
}

#[test]
fn policy_with_an_invalid_change_stays_in_force_and_says_so() {
    let mut index = services();
    apply(
        &mut index,
        policy(6, json!({"connections": {"maxRequests": 9}})),
    );
    let web = Key::new("shop", "web");
    let before = index.policies.of_service(&web).cloned();
    assert!(before.is_some());
    apply(
        &mut index,
        policy(7, json!({"connections": {"maxRequests": 0}})),
    );
    assert_eq!(index.policies.of_service(&web).cloned(), before);
    let expected = "web Accepted=false None spec.connections.maxRequests: \"0\" is not from 1 to \
                    1000000; generation 6 stays in force";
    assert_eq!(conditions(&index), [expected]);
}

#[test]
fn invalid_change_of_the_parents_has_no_effect_on_the_new_ones() {
    let mut index = services();
    apply(&mut index, state(UID, 1, "web", &["/one"]));
    apply(&mut index, state(UID, 2, "api", &["("]));
    assert_eq!(paths(&index, 7), in_force("/one"));
    assert_eq!(paths(&index, 8), [""; 0]);
    assert_eq!(
        conditions(&index),
        [format!("api Accepted=false None {PROBLEM}")]
    );
    change(
        &mut index,
        Change::Delete(STORED, Kind::HttpRoute, Key::new("shop", "r")),
    );
    assert_eq!(paths(&index, 7), [""; 0]);
}

#[test]
fn object_does_not_fall_back_to_that_of_a_deleted_one_with_its_name() {
    let mut index = services();
    apply(&mut index, route(1, &["/one"]));
    apply(&mut index, route(2, &["("]));
    store(&mut index);
    // A watch that was interrupted lists the successor without the deletion.
    let successor = state("another", 1, "web", &["("]);
    let reset = Change::Reset(STORED, Kind::HttpRoute, vec![successor]);
    change(&mut index, reset);
    assert_eq!(paths(&index, 7), [""; 0]);
    assert_eq!(store(&mut index).len(), 1, "the copy is deleted");
    assert_eq!(index.count(Kind::Revision), 0);
}

#[test]
fn states_of_more_than_the_limits_are_not_kept() {
    let mut index = services();
    let long = "a".repeat(128 * 1024);
    apply(&mut index, padded("r", UID, 1, "/one", &long));
    assert_eq!(paths(&index, 7), in_force("/one"));
    apply(&mut index, route(2, &["("]));
    assert_eq!(store(&mut index), []);
    let rejected = format!("web Accepted=false None {PROBLEM}");
    assert_eq!(conditions(&index), [rejected]);

    for number in 0..=MAX_REVISIONS {
        let (name, uid) = (format!("r{number}"), number.to_string());
        for (generation, path) in [(1, "/one"), (2, "(")] {
            apply(&mut index, padded(&name, &uid, generation, path, ""));
        }
    }
    assert_eq!(store(&mut index).len(), MAX_REVISIONS);
    assert_eq!(store(&mut index), []);
}

/// Service `next` with these annotations.
fn canary(version: &str, weight: &str) -> Object {
    canary_of("web", version, weight)
}

fn canary_of(of: &str, version: &str, weight: &str) -> Object {
    let annotations = json!({
        "diy-service-mesh/canary-of": of, "diy-service-mesh/canary-weight": weight,
    });
    annotated(version, annotations)
}

/// Service `next` with annotations.
fn annotated(version: &str, annotations: Value) -> Object {
    catalog::service(json!({
        "metadata": {
            "namespace": "shop", "name": "next", "uid": UID, "resourceVersion": version,
            "annotations": annotations,
        },
        "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": 80}]},
    }))
}

#[test]
fn invalid_weight_of_a_canary_leaves_its_share_in_force() {
    let next = Key::new("shop", "next");
    let shares = |index: &Index| index.service(&Key::new("shop", "web")).unwrap().canaries;
    let mut first = services();
    apply(&mut first, canary("5", "20"));
    apply(&mut first, canary("6", "2O"));
    let revisions = store(&mut first);
    assert_eq!(revisions.len(), 1);
    let mut second = services();
    for one in [vec![Change::Apply(STORED, canary("7", "2O"))], revisions].concat() {
        change(&mut second, one);
    }
    for index in [&mut first, &mut second] {
        assert_eq!(shares(index), [(next.clone(), 20)]);
        let expected = "web Accepted=false None diy-service-mesh/canary-weight: \"2O\" is not an \
                        integer from 0 to 100; the share of 20% stays in force";
        assert_eq!(conditions(index), [expected]);
        assert_eq!(store(index), []);
        apply(index, canary("8", "30"));
        assert_eq!(shares(index), [(next.clone(), 30)]);
        assert_eq!(
            conditions(index),
            ["web Accepted=true None the route applies to shop/web"]
        );
    }
}

#[test]
fn invalid_canary_takes_requests_of_no_other_service_than_before() {
    let next = Key::new("shop", "next");
    let shares = |index: &Index, name| index.service(&Key::new("shop", name)).unwrap().canaries;
    let mut index = services();
    apply(&mut index, canary("5", "20"));
    // The share of `web` stays in force, and neither the new name nor an invalid one gets it.
    for (version, of, weight) in [("6", "api", "101"), ("7", "api/web", "20"), ("8", "", "20")] {
        apply(&mut index, canary_of(of, version, weight));
        assert_eq!(shares(&index, "web"), [(next.clone(), 20)], "{of:?}");
        assert_eq!(shares(&index, "api"), []);
        store(&mut index);
        assert_eq!(index.count(Kind::Revision), 1);
    }
    apply(&mut index, canary_of("api", "9", "30"));
    assert_eq!(shares(&index, "web"), []);
    assert_eq!(shares(&index, "api"), [(next, 30)]);
}

#[test]
fn canary_without_its_annotations_leaves_nothing_behind() {
    let web = Key::new("shop", "web");
    let removed = |version: &str| vec![annotated(version, json!({}))];
    for now in [removed("7"), vec![]] {
        let mut index = services();
        apply(&mut index, canary("5", "20"));
        apply(&mut index, canary("6", "2O"));
        store(&mut index);
        assert_eq!(index.count(Kind::Revision), 1);
        let others = [("web", "10.96.0.7"), ("api", "10.96.0.8")];
        let others = others.map(|(name, ip)| Object::Service(service(name, &[ip])));
        let all = others.into_iter().chain(now).collect();
        change(&mut index, Change::Reset(STORED, Kind::Service, all));
        store(&mut index);
        let left = (index.count(Kind::Revision), index.revisions.links());
        assert_eq!(left, (0, 0));
        assert!(index.revisions.fallen_back.is_empty());
        // An invalid one of the same Service does not restore the share.
        apply(&mut index, canary("9", "2O"));
        assert_eq!(index.service(&web).unwrap().canaries, []);
        assert_eq!(store(&mut index), []);
    }
}

#[test]
fn state_in_force_uses_a_backend_only_while_a_grant_permits_it() {
    let mut index = services();
    let mut store = service("store", &["10.96.0.9"]);
    store.key = Key::new("data", "store");
    apply(&mut index, Object::Service(store));
    let grant = Grant {
        key: Key::new("data", "g"),
        from: vec![(Kind::HttpRoute, "shop".into())],
        to: vec![None],
    };
    let deleted = Change::Delete(STORED, Kind::Grant, grant.key.clone());
    apply(&mut index, Object::Grant(grant));
    let backend = json!({"namespace": "data", "name": "store", "port": 80});
    let mut valid = spec("web", &["/one"]);
    valid["rules"][0]["backendRefs"] = json!([backend]);
    apply(&mut index, parsed("r", (UID, 1), &valid));
    apply(&mut index, route(2, &["("]));
    let backends = |index: &Index| -> Vec<String> {
        let destination = Resource::Destination(([10, 96, 0, 7], 80).into());
        let (_, state) = index.resolve(&destination, &Location::default());
        let rules = state.target.unwrap().routes.unwrap().rules.clone();
        let backends = rules.iter().flat_map(|rule| rule.backends.clone());
        backends.map(|backend| backend.target).collect()
    };
    assert_eq!(backends(&index), ["data/store:80"]);
    change(&mut index, deleted);
    assert_eq!(backends(&index), [""], "its requests fail");
}

#[test]
fn route_that_is_made_invalid_again_and_again_has_one_stored_state() {
    let mut index = services();
    for generation in 0..200 {
        apply(&mut index, route(2 * generation + 1, &["/valid"]));
        apply(&mut index, route(2 * generation + 2, &["("]));
        store(&mut index);
        assert_eq!(index.count(Kind::Revision), 1);
        assert_eq!(store(&mut index), []);
        assert_eq!(paths(&index, 7), in_force("/valid"));
    }
    let route = Change::Delete(STORED, Kind::HttpRoute, Key::new("shop", "r"));
    change(&mut index, route);
    store(&mut index);
    assert_eq!(
        (index.count(Kind::Revision), index.revisions.links()),
        (0, 0)
    );
}
