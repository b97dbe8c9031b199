//! The policies of pods: which ones select them, what applies together, and the effect of changes.

mod egress;
mod routes;

use diy_mesh_proto::mesh::v1::authorization_policy::Action;
use prost::Message;
use serde_json::{Value, json};

use super::*;
use crate::catalog::Change;
use crate::index::Resource;
use crate::index::state::{State, TargetKind};
use crate::index::tests::{Stale, stale};
use crate::index::tests::{key, pod, service};
use crate::kinds::Object;
use crate::kinds::authorization::tests::policy;
use crate::kinds::service::TargetPort;
use crate::object::Condition;

/// The namespace of the mesh.
const MESH: &str = "service-mesh";

fn index(objects: impl IntoIterator<Item = Object>) -> Index {
    let mut index = Index::of_mesh(MESH);
    for object in objects {
        apply(&mut index, object);
    }
    index
}

fn apply(index: &mut Index, object: Object) -> Stale {
    stale(index, Change::Apply(object))
}

fn object(namespace: &str, name: &str, spec: Value) -> Object {
    Object::Authorization(policy(namespace, name, &spec))
}

/// A policy for pods with a selector.
fn of_pods(namespace: &str, name: &str, selector: Value, others: Value) -> Object {
    of(
        namespace,
        name,
        json!({"kind": "Pod", "selector": selector}),
        others,
    )
}

fn of(namespace: &str, name: &str, target: Value, others: Value) -> Object {
    let mut spec = json!({"targetRefs": [target]});
    let others = others.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(others);
    object(namespace, name, spec)
}

fn deny() -> Value {
    json!({"action": "DENY", "rules": [{}]})
}

/// A meshed pod.
fn pod_in(namespace: &str, name: &str) -> Pod {
    Pod {
        key: Key::new(namespace, name),
        ..pod(name, &[])
    }
}

fn state(index: &Index, pod: &Key) -> State {
    let location = index.location(pod, "");
    let resource = Resource::Workload(pod.clone(), "".into());
    index.resolve(&resource, &location).1
}

fn authorization(index: &Index, pod: &Key) -> Authorization {
    match state(index, pod).target.unwrap().kind {
        TargetKind::Workload(workload) => workload.authorization,
        kind => panic!("{kind:?}"),
    }
}

fn message(index: &Index, pod: &Key) -> proto::Authorization {
    authorization(index, pod).message().unwrap_or_default()
}

/// The policies of a pod with their ports.
fn policies(index: &Index, pod: &Key) -> Vec<(String, Vec<u32>)> {
    let policies = message(index, pod).policies.into_iter();
    let names = policies.map(|one| {
        let name = one.name.strip_prefix("AuthorizationPolicy ").unwrap();
        (name.to_owned(), one.ports)
    });
    names.collect()
}

fn names(index: &Index, pod: &Key) -> Vec<String> {
    let policies = policies(index, pod).into_iter();
    policies.map(|(name, _)| name).collect()
}

/// The policies that deny everything, and whether each is under audit.
fn denying_policies(index: &Index, pod: &Key) -> Vec<(String, bool)> {
    let policies = message(index, pod).policies.into_iter();
    let denying = policies.filter(|one| {
        let is_unknown = |rule: &proto::AuthorizationRule| rule.revision == u32::MAX;
        one.action() == Action::Deny && one.rules.iter().any(is_unknown)
    });
    denying.map(|one| (one.name, one.audit)).collect()
}

fn condition(index: &Index, key: &Key) -> Condition {
    let status = index.status(&(Kind::Authorization, key.clone()));
    let mut parents = status.unwrap().unwrap().parents.into_iter();
    parents.next().unwrap().conditions.remove(0)
}

#[test]
fn selectors_select_pods_of_the_own_namespace_by_all_their_conditions() {
    let expression = |operator: &str, values: Value| {
        let mut one = json!({"key": "app", "operator": operator});
        if !values.is_null() {
            one["values"] = values;
        }
        json!({"matchExpressions": [one]})
    };
    let unlabelled = Pod {
        labels: Default::default(),
        ..pod_in("shop", "bare")
    };
    for (selector, web, bare) in [
        (json!({}), true, true),
        (json!({"matchLabels": {"app": "web"}}), true, false),
        (
            json!({"matchLabels": {"app": "web", "tier": "a"}}),
            false,
            false,
        ),
        (expression("In", json!(["api", "web"])), true, false),
        (expression("NotIn", json!(["web"])), false, true),
        (expression("NotIn", json!(["api"])), true, true),
        (expression("Exists", Value::Null), true, false),
        (expression("DoesNotExist", Value::Null), false, true),
    ] {
        let index = index([
            Object::Pod(pod_in("shop", "web")),
            Object::Pod(unlabelled.clone()),
            Object::Pod(pod_in("bank", "web")),
            of_pods("shop", "p", selector.clone(), deny()),
        ]);
        let selects = |name| !policies(&index, &key(name)).is_empty();
        assert_eq!([selects("web"), selects("bare")], [web, bare], "{selector}");
        assert_eq!(names(&index, &Key::new("bank", "web")), [""; 0]);
    }
}

#[test]
fn policy_is_found_once_by_whichever_of_its_targets_selects_the_pod() {
    let pods = |selector: Value| json!({"kind": "Pod", "selector": selector});
    let labels = |labels: Value| pods(json!({"matchLabels": labels}));
    let of_targets = |name: &str, targets: &[Value]| {
        let spec = json!({"targetRefs": targets, "action": "DENY", "rules": [{}]});
        object("shop", name, spec)
    };
    let app = labels(json!({"app": "web"}));
    let both = labels(json!({"app": "web", "tier": "a"}));
    let other = labels(json!({"app": "api"}));
    let mut web = pod_in("shop", "web");
    web.labels.insert("tier".to_owned(), "a".to_owned());
    let mut index = index([
        Object::Pod(web),
        of_targets("a", &[other.clone(), both.clone(), app.clone()]),
        of_targets("b", &[pods(json!({})), app.clone()]),
        of_targets("c", std::slice::from_ref(&other)),
        of_targets("d", &[both, other.clone()]),
        of_pods(MESH, "z", json!({"matchLabels": {"tier": "a"}}), deny()),
    ]);
    let all = [&*format!("{MESH}/z"), "shop/a", "shop/b", "shop/d"];
    assert_eq!(names(&index, &key("web")), all);
    // One loses its label, and another one gets it.
    apply(&mut index, of_targets("a", std::slice::from_ref(&other)));
    apply(&mut index, of_targets("c", &[app]));
    let all = [&*format!("{MESH}/z"), "shop/b", "shop/c", "shop/d"];
    assert_eq!(names(&index, &key("web")), all);
}

#[test]
fn service_account_selects_the_pods_that_run_under_it() {
    let with_account = |name: &str, account: &str| {
        Object::Pod(Pod {
            identity: Some(format!("spiffe://cluster.local/ns/shop/sa/{account}").into()),
            ..pod_in("shop", name)
        })
    };
    let target = json!({"kind": "ServiceAccount", "name": "web"});
    let index = index([
        with_account("a", "web"),
        with_account("b", "web-2"),
        of("shop", "p", target, deny()),
    ]);
    assert_eq!(names(&index, &key("a")), ["shop/p"]);
    assert_eq!(names(&index, &key("b")), [""; 0]);
}

/// Service `web` with this target port.
fn web(port: u16) -> Service {
    let mut web = service("web", &["10.96.0.7"]);
    web.ports.truncate(1);
    web.ports[0].target = TargetPort::Number(port);
    web
}

#[test]
fn service_covers_its_target_ports_at_the_pods_that_it_selects() {
    let target = || json!({"kind": "Service", "name": "web"});
    let mut index = index([
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
        of("shop", "p", target(), deny()),
    ]);
    let all = |ports: &[u32]| vec![("shop/p".to_owned(), ports.to_vec())];
    assert_eq!(policies(&index, &key("a")), all(&[8080]));
    // Another port, another selector, and none: each concerns the pod.
    let other = Service {
        selector: [("app".to_owned(), "other".to_owned())].into(),
        ..web(9090)
    };
    for (service, expected) in [
        (web(9090), all(&[9090])),
        (other, vec![]),
        (web(80), all(&[80])),
    ] {
        let touched = apply(&mut index, Object::Service(service));
        assert_eq!(touched.pods, [key("a")].into());
        assert_eq!(policies(&index, &key("a")), expected);
    }
    assert_eq!(condition(&index, &key("p")).reason, "Accepted");
    index.take_changed_statuses();
    let touched = stale(&mut index, Change::Delete(Kind::Service, key("web")));
    assert_eq!(touched.pods, [key("a")].into());
    assert_eq!(policies(&index, &key("a")), []);
    let changed = index.take_changed_statuses();
    assert!(changed.contains(&(Kind::Authorization, key("p"))));
    assert_eq!(condition(&index, &key("p")).reason, "TargetNotFound");
}

/// A policy that asks port 80 of the Service `web`, for all pods of its namespace.
fn asking(namespace: &str) -> Object {
    let backend = json!({"name": "web", "namespace": "shop", "port": 80});
    let server = json!({"protocol": "GRPC", "backendRef": backend});
    let others = json!({"action": "ExternalAuth", "externalAuth": server, "rules": [{}]});
    of_pods(namespace, "p", json!({}), others)
}

#[test]
fn policy_does_not_apply_to_its_authorization_server() {
    let other = Pod {
        labels: [("app".to_owned(), "cart".to_owned())].into(),
        ..pod_in("shop", "cart")
    };
    for namespace in ["shop", MESH] {
        let mut index = index([
            Object::Service(web(8080)),
            Object::Pod(pod_in("shop", "a")),
            Object::Pod(other.clone()),
            asking(namespace),
        ]);
        let policy = format!("{namespace}/p");
        assert_eq!(names(&index, &key("a")), [""; 0]);
        assert_eq!(names(&index, &key("cart")), [&*policy]);
        // The server moves to other pods.
        let moved = Service {
            selector: [("app".to_owned(), "cart".to_owned())].into(),
            ..web(8080)
        };
        let touched = apply(&mut index, Object::Service(moved));
        assert_eq!(touched.pods, [key("a"), key("cart")].into());
        assert_eq!(names(&index, &key("a")), [&*policy]);
        assert_eq!(names(&index, &key("cart")), [""; 0]);
        let touched = stale(&mut index, Change::Delete(Kind::Service, key("web")));
        assert!(touched.pods.contains(&key("cart")));
        assert_eq!(names(&index, &key("cart")), [&*policy]);
    }
}

#[test]
fn status_tells_whether_the_authorization_server_exists() {
    let mut index = index([Object::Pod(pod_in("shop", "a")), asking("bank")]);
    let policy = Key::new("bank", "p");
    let backend = "spec.externalAuth.backendRef: the Service shop/web";
    let resolved = |index: &Index| {
        let status = index.status(&(Kind::Authorization, policy.clone()));
        let parent = status.unwrap().unwrap().parents.remove(0);
        assert!(parent.conditions[0].holds, "it is accepted");
        let last = parent.conditions.into_iter().next_back().unwrap();
        assert_eq!(last.kind, "ResolvedRefs");
        (last.holds, last.reason, last.message)
    };
    let missing = |message: &str| (false, "BackendNotFound", format!("{backend} {message}"));
    assert_eq!(resolved(&index), missing("does not exist"));
    let other_port = Service {
        ports: vec![],
        ..web(8080)
    };
    let external = Service {
        external_name: "example.com".into(),
        ..web(8080)
    };
    let exists = "the authorization server shop/web:80 exists".to_owned();
    let is_external = (
        false,
        "InvalidKind",
        format!("{backend} is an ExternalName"),
    );
    for (service, expected) in [
        (other_port, missing("has no TCP port 80")),
        (external, is_external),
        (web(8080), (true, "ResolvedRefs", exists)),
    ] {
        index.take_changed_statuses();
        apply(&mut index, Object::Service(service));
        let changed = index.take_changed_statuses();
        assert!(changed.contains(&(Kind::Authorization, policy.clone())));
        assert_eq!(resolved(&index), expected);
    }
}

#[test]
fn status_names_allow_rules_without_conditions_and_dropped_fields() {
    let status = |others: Value, dropped: Option<&str>| {
        let others = of_pods("shop", "p", json!({}), others);
        let Object::Authorization(mut policy) = others else {
            panic!("it is a policy")
        };
        policy.dropped = dropped.map(|text| Arc::new(text.to_owned()));
        let index = index([Object::Authorization(policy)]);
        let status = index.status(&(Kind::Authorization, key("p")));
        let mut conditions = status.unwrap().unwrap().parents.remove(0).conditions;
        let last = conditions.pop().filter(|_| !conditions.is_empty())?;
        assert!(last.kind == "diy-service-mesh.dev/AllowsAll" && last.holds);
        Some((last.is_problem(), last.reason, last.message))
    };
    let allow = |rules: Value| json!({"action": "ALLOW", "rules": rules});
    let note = |message: &str| Some((false, "RuleWithoutConditions", message.to_owned()));
    let account = json!({"sources": [{"type": "Namespace", "namespace": "shop"}]});
    let every_caller = "has no sources and no requests: it allows every caller";
    assert_eq!(
        status(allow(json!([account, {}])), None),
        note(&format!("spec.rules[1] {every_caller}"))
    );
    assert_eq!(
        status(allow(json!([{"networkAttributes": {"ports": [80]}}])), None),
        note(&format!("spec.rules[0] {every_caller} at its ports"))
    );
    assert_eq!(
        status(allow(json!([{}])), Some("spec.rules[].source was dropped")),
        Some((
            true,
            "FieldsDropped",
            format!("spec.rules[0] {every_caller}; spec.rules[].source was dropped")
        ))
    );
    let outbound = json!({"action": "ALLOW", "direction": "Outbound", "rules": [{}]});
    assert_eq!(
        status(outbound, None),
        note("spec.rules[0] has no destinations: it allows every destination")
    );
    let requests = json!({"requests": [{"methods": ["GET"]}]});
    for rules in [
        json!([account]),
        json!([requests]),
        json!([{"sources": []}]),
        json!([]),
    ] {
        assert_eq!(status(allow(rules), Some("spec.x was dropped")), None);
    }
    assert_eq!(status(deny(), Some("spec.x was dropped")), None);
}

#[test]
fn missing_server_is_told_before_missing_keys() {
    let key = Key::new("shop", "p");
    let spec = json!({
        "targetRefs": [{"kind": "Pod", "selector": {}}],
        "action": "ExternalAuth",
        "externalAuth": {"protocol": "GRPC", "backendRef": {"name": "web", "port": 80}},
        "issuers": [{
            "issuer": "https://id.example.com",
            "audiences": ["shop"],
            "keys": {"type": "URL", "url": "https://id.example.com/keys"},
        }],
        "rules": [{}],
    });
    let mut index = index([object("shop", "p", spec)]);
    let reasons = |index: &Index| {
        let status = index.status(&(Kind::Authorization, key.clone()));
        let conditions = status.unwrap().unwrap().parents.remove(0).conditions;
        Vec::from_iter(conditions.into_iter().map(|one| one.reason))
    };
    assert_eq!(reasons(&index), ["Accepted", "BackendNotFound"]);
    apply(&mut index, Object::Service(web(8080)));
    assert_eq!(reasons(&index), ["Accepted", "KeysNotFound"]);
}

#[test]
fn named_target_port_that_a_pod_does_not_declare_is_not_covered() {
    let target = json!({"kind": "Service", "name": "web"});
    let index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Pod(pod_in("shop", "a")),
        of("shop", "p", target, deny()),
    ]);
    assert_eq!(policies(&index, &key("a")), []);
}

#[test]
fn scope_ports_covers_the_ports_of_the_rules_that_the_target_has() {
    let rules = json!([{"networkAttributes": {"ports": [8080, 9090]}}]);
    let ports = || json!({"action": "ALLOW", "scope": "Ports", "rules": rules});
    let target = || json!({"kind": "Service", "name": "web"});
    let index = index([
        Object::Service(web(8080)),
        Object::Service(Service {
            key: key("other"),
            ..web(80)
        }),
        Object::Pod(pod_in("shop", "a")),
        of("shop", "p1", target(), ports()),
        of_pods("shop", "p2", json!({}), ports()),
        of(
            "shop",
            "p3",
            json!({"kind": "Service", "name": "other"}),
            ports(),
        ),
    ]);
    let expected = [
        ("shop/p1".into(), vec![8080]),
        ("shop/p2".into(), vec![8080, 9090]),
    ];
    assert_eq!(policies(&index, &key("a")), expected);
}

#[test]
fn policies_of_the_namespace_and_of_the_mesh_apply_together() {
    let by_name = json!({"kind": "ServiceAccount", "name": "web"});
    let index = index([
        Object::Pod(pod_in("shop", "a")),
        Object::Pod(pod_in(MESH, "a")),
        of_pods("shop", "one", json!({}), deny()),
        of_pods("shop", "another", json!({}), deny()),
        of_pods("bank", "foreign", json!({}), deny()),
        of_pods(MESH, "all", json!({"matchLabels": {"app": "web"}}), deny()),
        of(MESH, "own", by_name, deny()),
    ]);
    let all = ["service-mesh/all", "shop/another", "shop/one"];
    assert_eq!(names(&index, &key("a")), all);
    assert_eq!(names(&index, &Key::new(MESH, "a"))[0], "service-mesh/all");
}

#[test]
fn default_of_the_mesh_to_deny_is_not_loosened_and_deny_wins_within_a_namespace() {
    let default = |namespace: &str, name: &str, default: &str| {
        of_pods(
            namespace,
            name,
            json!({}),
            json!({"defaultAction": default}),
        )
    };
    let found = |objects: Vec<Object>| {
        let pod = Object::Pod(pod_in("shop", "a"));
        let message = message(&index(objects.into_iter().chain([pod])), &key("a"));
        assert_eq!(message.policies, []);
        (message.deny_by_default, message.default_name)
    };
    let named = |deny, name: &str| (deny, format!("AuthorizationPolicy {name}"));
    assert_eq!(found(vec![]), (false, String::new()));
    assert_eq!(
        found(vec![default("bank", "d", "DENY")]),
        (false, String::new())
    );
    let strict = || default(MESH, "d", "DENY");
    let loose = || default("shop", "b", "ALLOW");
    assert_eq!(
        found(vec![strict(), loose()]),
        named(true, "service-mesh/d")
    );
    let loose_mesh = default(MESH, "d", "ALLOW");
    let own = || default("shop", "c", "DENY");
    assert_eq!(found(vec![loose_mesh, own()]), named(true, "shop/c"));
    assert_eq!(found(vec![loose(), own()]), named(true, "shop/c"));
    assert_eq!(found(vec![loose()]), named(false, "shop/b"));
}

#[test]
fn invalid_policy_denies_its_targets_and_without_them_its_namespace() {
    let labelled = json!({"matchLabels": {"app": "web"}});
    let bare = Pod {
        labels: Default::default(),
        ..pod_in("shop", "bare")
    };
    let unknown = json!({"action": "ALLOW", "rules": [{"fromTheFuture": 1}]});
    let audited = json!({"action": "NONE", "mode": "Audit"});
    let mode = json!({"action": "DENY", "mode": "Later"});
    for (policy, of_web, of_bare) in [
        (
            of_pods("shop", "p", labelled.clone(), unknown),
            Some(false),
            None,
        ),
        (
            of_pods("shop", "p", labelled.clone(), audited),
            Some(true),
            None,
        ),
        (of_pods("shop", "p", labelled, mode), Some(false), None),
        (
            of("shop", "p", json!({"kind": "Node"}), deny()),
            Some(false),
            Some(false),
        ),
        (object("shop", "p", Value::Null), Some(false), Some(false)),
    ] {
        let index = index([
            Object::Pod(pod_in("shop", "web")),
            Object::Pod(bare.clone()),
            Object::Pod(pod_in("bank", "web")),
            policy,
        ]);
        let denied = |audit: bool| vec![("AuthorizationPolicy shop/p".to_owned(), audit)];
        let expected = [of_web, of_bare, None].map(|audit| audit.map_or(vec![], denied));
        let pods = [key("web"), key("bare"), Key::new("bank", "web")];
        assert_eq!(pods.map(|pod| denying_policies(&index, &pod)), expected);
        let Condition {
            reason, message, ..
        } = condition(&index, &key("p"));
        assert_eq!(reason, "Invalid");
        assert!(
            message.contains("calls of its targets are denied"),
            "{message}"
        );
    }
}

#[test]
fn invalid_policy_of_the_mesh_withholds_the_state_of_all_pods() {
    let mut index = index([
        Object::Pod(pod_in("shop", "a")),
        Object::Pod(pod_in(MESH, "a")),
    ]);
    // An ALLOW of the mesh covers the ports that it names.
    let allow = json!({"action": "ALLOW", "rules": [{}]});
    let touched = apply(&mut index, of_pods(MESH, "p", json!({}), allow));
    let pods = [key("a"), Key::new(MESH, "a")];
    assert_eq!(touched.pods, pods.clone().into());
    assert!(pods.iter().all(|pod| state(&index, pod).is_withheld));
    assert_eq!(
        *index.invalid_policies_of_mesh(),
        [Key::new(MESH, "p")].into()
    );
    let condition = condition(&index, &Key::new(MESH, "p"));
    assert!(
        condition.message.contains("pods that start wait"),
        "{condition:?}"
    );
    let touched = stale(
        &mut index,
        Change::Delete(Kind::Authorization, Key::new(MESH, "p")),
    );
    assert_eq!(touched.pods, pods.clone().into());
    assert!(pods.iter().all(|pod| !state(&index, pod).is_withheld));
}

#[test]
fn unreadable_kind_withholds_the_state_of_pods() {
    let mut index = index([Object::Pod(pod_in("shop", "a"))]);
    index.take_changed();
    index.set_readable(Kind::Authorization, false);
    assert!(index.take_changed().all && state(&index, &key("a")).is_withheld);
    index.set_readable(Kind::Authorization, true);
    assert!(!state(&index, &key("a")).is_withheld);
}

#[test]
fn pods_wait_for_policies_that_were_deleted_with_their_definition() {
    let pods = ["shop", "bank"].map(|namespace| Object::Pod(pod_in(namespace, "a")));
    let mut index = index(pods);
    let mut lose = |namespaces: &[&str]| {
        let lost = namespaces.iter().map(|name| Arc::from(*name)).collect();
        let touched = stale(&mut index, Change::Lost(lost));
        index.apply(Change::NotInstalled(Kind::Authorization));
        let is_withheld = |namespace| state(&index, &Key::new(namespace, "a")).is_withheld;
        (!touched.pods.is_empty(), ["shop", "bank"].map(is_withheld))
    };
    assert_eq!(lose(&[]), (false, [false, false]));
    assert_eq!(lose(&["shop"]), (true, [true, false]));
    assert_eq!(lose(&[MESH]), (true, [true, true]), "all");
    assert_eq!(lose(&[]), (true, [false, false]), "forgotten");
    assert_eq!(lose(&["shop", "bank"]), (true, [true, true]));
    let listed = Change::Reset(Kind::Authorization, vec![]);
    let touched = stale(&mut index, listed);
    assert!(!touched.pods.is_empty() && !state(&index, &key("a")).is_withheld);
}

#[test]
fn policies_over_the_bound_deny_without_their_rules() {
    let header = json!({"name": "h", "type": "Exact", "value": "v".repeat(1000)});
    let requests = json!([{"headers": vec![header; 16]}]);
    let large = || json!({"action": "ALLOW", "rules": vec![json!({"requests": requests}); 8]});
    let audited = json!({"action": "ALLOW", "mode": "Audit", "rules": vec![json!({"requests": requests}); 8]});
    let service = || json!({"kind": "Service", "name": "web"});
    let mut index = index([
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
        of_pods("shop", "p1", json!({}), large()),
        of("shop", "p2", service(), large()),
        of_pods("shop", "p3", json!({}), audited),
        of_pods(MESH, "q", json!({}), deny()),
    ]);
    let all = authorization(&index, &key("a"));
    let denied = denying_policies(&index, &key("a"));
    let expected = [("shop/p2", false), ("shop/p3", true)];
    assert_eq!(
        denied,
        expected.map(|(name, audit)| (format!("AuthorizationPolicy {name}"), audit))
    );
    let ports = policies(&index, &key("a"));
    assert_eq!(ports[2], ("shop/p2".to_owned(), vec![8080]));
    let too_large: Vec<&Key> = all
        .keys()
        .filter(|(_, is)| *is)
        .map(|(key, _)| key)
        .collect();
    assert_eq!(too_large, [&key("p2"), &key("p3")]);
    assert!(all.message().unwrap().encoded_len() <= MAX_BYTES);
    for name in 0..MAX_POLICIES {
        apply(
            &mut index,
            of_pods("shop", &format!("n{name:04}"), json!({}), deny()),
        );
    }
    let message = message(&index, &key("a"));
    assert_eq!(message.policies.len(), MAX_POLICIES + 2);
    // It covers all ports, as its policies do together.
    assert_eq!(message.policies[MAX_POLICIES].ports, [0; 0]);
}

#[test]
fn policies_over_the_bound_deny_at_the_ports_of_all_until_these_are_too_many() {
    let excess = |policies: usize, ports: usize| {
        let mut all = Vec::new();
        for policy in 0..policies {
            // Half of the ports are ports of the policy before, too.
            let first = u32::try_from(policy * ports / 2).unwrap();
            let ports = (first..).take(ports).collect();
            let mode = [Mode::Enforce, Mode::Audit][policy % 2];
            Excess::add(&mut all, &format!("p{policy}"), mode, ports);
            // A set grows, and is never collected again once it is full.
            let mut sets = all.iter().filter_map(|one| one.ports.as_ref());
            assert!(sets.all(|set| set.len() <= MAX_PORTS));
        }
        let messages = all.into_iter().map(Excess::message);
        let messages = messages.map(|one| (one.name, one.audit, one.ports));
        Vec::from_iter(messages)
    };
    let named = |number, audit, ports: Vec<u32>| (format!("p{number}"), audit, ports);
    let few = [
        named(0, false, vec![0, 1, 2, 3, 4, 5, 6, 7]),
        named(1, true, vec![2, 3, 4, 5]),
    ];
    assert_eq!(excess(3, 4), few);
    let [enforced, audited] = [0, 1].map(|first| (first * 5..first * 5 + 1000).collect());
    let full = [named(0, false, enforced), named(1, true, audited)];
    assert_eq!(excess(200, 10), full);
    let all = [named(0, false, vec![]), named(1, true, vec![])];
    assert_eq!(excess(202, 10), all, "all ports");
    assert_eq!(excess(20_000, 1000), all);
}

#[test]
fn state_differs_with_each_policy_and_not_with_the_order_of_events() {
    let objects = || {
        vec![
            Object::Pod(pod_in("shop", "a")),
            of_pods("shop", "one", json!({}), deny()),
            of_pods(MESH, "two", json!({}), deny()),
            of_pods(
                "shop",
                "default",
                json!({}),
                json!({"defaultAction": "DENY"}),
            ),
        ]
    };
    let version = |objects: Vec<Object>| state(&index(objects), &key("a")).version;
    let all = version(objects());
    let reversed = objects().into_iter().rev().collect();
    assert_eq!(version(reversed), all);
    for position in 1..4 {
        let mut fewer = objects();
        fewer.remove(position);
        assert_ne!(version(fewer), all);
    }
    let mut changed = objects();
    let allow = json!({"action": "ALLOW", "rules": [{}]});
    changed[1] = of_pods("shop", "one", json!({}), allow);
    assert_ne!(version(changed), all);
}

#[test]
fn changes_touch_the_pods_that_they_concern() {
    let mut index = index([
        Object::Pod(pod_in("shop", "a")),
        Object::Pod(pod_in("bank", "b")),
        Object::Pod(Pod {
            identity: None,
            ..pod_in("shop", "unmeshed")
        }),
    ]);
    let own = of_pods("shop", "p", json!({}), deny());
    assert_eq!(apply(&mut index, own.clone()).pods, [key("a")].into());
    assert_eq!(apply(&mut index, own).pods, [].into(), "no change");
    let all = [key("a"), Key::new("bank", "b")];
    let of_mesh = of_pods(MESH, "p", json!({}), deny());
    assert_eq!(apply(&mut index, of_mesh).pods, all.into());
    let unlabelled = Pod {
        labels: Default::default(),
        ..pod_in("shop", "a")
    };
    let touched = apply(&mut index, Object::Pod(unlabelled));
    assert_eq!(touched.pods, [key("a")].into());
}

#[test]
fn pods_are_open_where_the_last_allow_lost_its_service() {
    let allow = |name: &str, service: &str| {
        let target = json!({"kind": "Service", "name": service});
        of(
            "shop",
            name,
            target,
            json!({"action": "ALLOW", "rules": [{}]}),
        )
    };
    let pods = ["a", "b"].map(|name| Object::Pod(pod_in("shop", name)));
    let objects = [allow("p", "web"), Object::Service(service("web", &[]))];
    let mut index = index(pods.into_iter().chain(objects));
    let opened = |index: &Index| {
        let opened = index.opened().into_iter();
        let text = |(policy, service, pods): (&Key, String, Vec<&Key>)| {
            let pods = pods.iter().map(|pod| pod.to_string());
            format!(
                "{policy}, {service}: {}",
                pods.collect::<Vec<_>>().join(" ")
            )
        };
        opened.map(text).collect::<Vec<_>>()
    };
    assert_eq!(opened(&index), [""; 0]);
    let mut other = service("web", &[]);
    other.selector = [("app".to_owned(), "other".to_owned())].into();
    apply(&mut index, Object::Service(other));
    let expected = ["shop/p, Service shop/web: shop/a shop/b"];
    assert_eq!(opened(&index), expected, "another selector");
    let change = Change::Delete(Kind::Service, key("web"));
    index.apply(change);
    assert_eq!(opened(&index), expected, "no Service");
    let of_b = json!({"matchLabels": {"name": "b"}});
    let rules = || json!({"action": "ALLOW", "rules": [{}]});
    let mut b = pod_in("shop", "b");
    b.labels.insert("name".to_owned(), "b".to_owned());
    apply(&mut index, Object::Pod(b));
    apply(&mut index, of_pods("shop", "of-b", of_b, rules()));
    assert_eq!(opened(&index), ["shop/p, Service shop/web: shop/a"]);
    let default = json!({"defaultAction": "DENY"});
    apply(&mut index, of_pods("shop", "default", json!({}), default));
    assert_eq!(opened(&index), [""; 0]);
}

#[test]
fn pod_that_wants_plain_paths_gets_this_with_its_policies() {
    let mut pod = pod_in("shop", "a");
    pod.inbound.plain_paths = true;
    let mut index = index([Object::Pod(pod), Object::Pod(pod_in("shop", "b"))]);
    assert!(!message(&index, &key("a")).plain_paths);
    apply(&mut index, of_pods("shop", "p", json!({}), deny()));
    let [a, b] = ["a", "b"].map(|pod| message(&index, &key(pod)).plain_paths);
    assert!(a && !b);
}
