//! Policies about calls by pods to outside of the cluster, beside those about calls to them.

use super::*;

/// An Outbound policy for all pods of its namespace.
fn outbound(namespace: &str, name: &str, others: Value) -> Object {
    let mut spec =
        json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "direction": "Outbound"});
    let others = others.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(others);
    object(namespace, name, spec)
}

fn default(namespace: &str, name: &str, default: &str) -> Object {
    outbound(namespace, name, json!({"defaultAction": default}))
}

fn allow(host: &str) -> Value {
    let destinations = json!([{"type": "Host", "host": host}]);
    json!({"action": "ALLOW", "rules": [{"destinations": destinations}]})
}

/// The authorization of calls to a pod, and of calls by it.
fn both(index: &Index, pod: &Key) -> [proto::Authorization; 2] {
    match state(index, pod).target.unwrap().kind {
        TargetKind::Workload(workload) => [
            workload.authorization.message().unwrap_or_default(),
            workload.egress.message().unwrap_or_default(),
        ],
        kind => panic!("{kind:?}"),
    }
}

fn egress(index: &Index, pod: &Key) -> proto::Authorization {
    let [_, egress] = both(index, pod);
    egress
}

fn names_of(message: &proto::Authorization) -> Vec<&str> {
    let policies = message.policies.iter();
    let names = policies.map(|one| one.name.strip_prefix("AuthorizationPolicy "));
    names.map(Option::unwrap).collect()
}

/// Whether the policy denies everything at all ports, for each direction.
fn denies(index: &Index, pod: &Key) -> [bool; 2] {
    both(index, pod).map(|message| {
        let mut policies = message.policies.iter();
        policies.any(|one| one.ports.is_empty() && one.rules[0].revision == u32::MAX)
    })
}

#[test]
fn policies_of_a_direction_change_nothing_in_the_other_one() {
    let inbound = || of_pods("shop", "in", json!({}), deny());
    let objects = || vec![Object::Pod(pod_in("shop", "a")), inbound()];
    let mut index = index(objects());
    let before = state(&index, &key("a"));
    let [calls, none] = both(&index, &key("a"));
    assert_eq!(none, proto::Authorization::default());
    let touched = apply(&mut index, outbound("shop", "out", allow("a.test")));
    assert_eq!(touched.pods, [key("a")].into());
    let [same, egress] = both(&index, &key("a"));
    assert_eq!(same, calls);
    assert_eq!(names_of(&egress), ["shop/out"]);
    assert_ne!(state(&index, &key("a")).version, before.version);
    apply(&mut index, outbound("shop", "out", allow("b.test")));
    let later = state(&index, &key("a"));
    apply(&mut index, default("shop", "d", "DENY"));
    apply(&mut index, default(MESH, "d", "DENY"));
    let [same, denied] = both(&index, &key("a"));
    assert_eq!((same, denied.deny_by_default), (calls, true));
    // A policy that changes its direction leaves the other one.
    apply(&mut index, of_pods("shop", "out", json!({}), deny()));
    let [calls, egress] = both(&index, &key("a"));
    assert_eq!(names_of(&calls), ["shop/in", "shop/out"]);
    assert_eq!(names_of(&egress), [""; 0]);
    for (namespace, name) in [("shop", "out"), ("shop", "d"), (MESH, "d")] {
        let change = Change::Delete(Kind::Authorization, Key::new(namespace, name));
        let touched = stale(&mut index, change);
        assert_eq!(touched.pods, [key("a")].into());
    }
    let after = state(&index, &key("a")).version;
    assert!(after == before.version && after != later.version);
}

#[test]
fn policies_of_the_mesh_and_of_accounts_select_pods_as_inbound_ones_do() {
    let of_account = json!({"kind": "ServiceAccount", "name": "web"});
    let with_direction = |namespace: &str, name: &str, target: &Value| {
        let rules = json!([{"networkAttributes": {"ports": [443]}}]);
        let spec = json!({"targetRefs": [target], "direction": "Outbound", "action": "ALLOW",
            "scope": "Ports", "rules": rules});
        object(namespace, name, spec)
    };
    let labels = json!({"kind": "Pod", "selector": {"matchLabels": {"app": "web"}}});
    let other = json!({"kind": "Pod", "selector": {"matchLabels": {"app": "api"}}});
    let index = index([
        Object::Pod(pod_in("shop", "a")),
        with_direction("shop", "account", &of_account),
        with_direction("shop", "labels", &labels),
        with_direction("shop", "other", &other),
        with_direction("bank", "foreign", &labels),
        with_direction(MESH, "all", &labels),
    ]);
    let egress = egress(&index, &key("a"));
    let all = ["service-mesh/all", "shop/account", "shop/labels"];
    assert_eq!(names_of(&egress), all);
    assert!(egress.policies.iter().all(|one| one.ports == [443]));
}

#[test]
fn namespace_cannot_loosen_the_default_of_the_mesh() {
    let found = |objects: Vec<Object>| {
        let pods = ["shop", "bank"].map(|name| Object::Pod(pod_in(name, "a")));
        let index = index(objects.into_iter().chain(pods));
        ["shop", "bank"].map(|name| egress(&index, &Key::new(name, "a")).deny_by_default)
    };
    let closed = || default(MESH, "d", "DENY");
    assert_eq!(found(vec![]), [false, false]);
    assert_eq!(found(vec![closed()]), [true, true]);
    assert_eq!(
        found(vec![closed(), default("shop", "a", "ALLOW")]),
        [true, true]
    );
    // One of the other direction, and an invalid one.
    let inbound = of_pods("shop", "a", json!({}), json!({"defaultAction": "ALLOW"}));
    assert_eq!(found(vec![closed(), inbound]), [true, true]);
    let of_all = outbound(
        "shop",
        "a",
        json!({"defaultAction": "ALLOW", "mode": "Audit"}),
    );
    assert_eq!(found(vec![closed(), of_all]), [true, true]);
    assert_eq!(found(vec![default("shop", "a", "DENY")]), [true, false]);
    let loose = default(MESH, "d", "ALLOW");
    assert_eq!(
        found(vec![loose, default("shop", "a", "DENY")]),
        [true, false]
    );
}

#[test]
fn policy_that_cannot_be_read_denies_in_its_direction_or_in_both() {
    let pods = json!({"kind": "Pod", "selector": {}});
    let service = json!({"kind": "Service", "name": "web"});
    for (target, direction, expected) in [
        (&pods, json!("Outbound"), [false, true]),
        (&pods, json!("Inbound"), [true, false]),
        (&pods, json!("Egress"), [true, true]),
        (&pods, Value::Null, [true, true]),
        // The ports of the Service are no ports of destinations.
        (&service, json!("Outbound"), [false, true]),
        (&service, json!("Egress"), [true, true]),
    ] {
        let spec = json!({"targetRefs": [target], "direction": direction, "action": "LATER"});
        let mut index = index([
            Object::Service(web(8080)),
            Object::Pod(pod_in("shop", "a")),
            Object::Pod(pod_in("bank", "a")),
            object("shop", "p", spec),
        ]);
        assert_eq!(denies(&index, &key("a")), expected, "{direction}");
        assert_eq!(denies(&index, &Key::new("bank", "a")), [false; 2]);
        assert_eq!(condition(&index, &key("p")).reason, "Invalid");
        let touched = apply(&mut index, outbound("shop", "p", allow("a.test")));
        assert_eq!(touched.pods, [key("a")].into());
        assert_eq!(denies(&index, &key("a")), [false; 2]);
    }
    let index = index([
        Object::Pod(pod_in("shop", "a")),
        object("shop", "p", Value::Null),
    ]);
    assert_eq!(denies(&index, &key("a")), [true; 2]);
}

#[test]
fn invalid_policy_of_the_mesh_withholds_states_in_either_direction() {
    let pod = Object::Pod(pod_in("shop", "a"));
    // An ALLOW of the mesh covers the ports that it names.
    let mut index = index([pod, outbound(MESH, "p", allow("a.test"))]);
    assert!(state(&index, &key("a")).is_withheld);
    let mut scoped = allow("a.test");
    scoped["scope"] = "Ports".into();
    scoped["rules"][0]["networkAttributes"] = json!({"ports": [443]});
    apply(&mut index, outbound(MESH, "p", scoped));
    assert!(!state(&index, &key("a")).is_withheld);
}

#[test]
fn policies_over_the_bound_deny_in_their_direction_only() {
    let pod = || Object::Pod(pod_in("shop", "a"));
    let many = |range: std::ops::Range<usize>, is_outbound: bool| {
        range.map(move |number| {
            let name = format!("n{number:04}");
            if is_outbound {
                outbound("shop", &name, allow("a.test"))
            } else {
                of_pods("shop", &name, json!({}), deny())
            }
        })
    };
    let index = index(
        [pod()]
            .into_iter()
            .chain(many(0..MAX_POLICIES + 1, true))
            .chain(many(2000..2010, false)),
    );
    let [calls, egress] = both(&index, &key("a"));
    assert_eq!(calls.policies.len(), 10);
    assert_eq!(egress.policies.len(), MAX_POLICIES + 1);
    assert_eq!(denies(&index, &key("a")), [false, true]);
    let too_large = match state(&index, &key("a")).target.unwrap().kind {
        TargetKind::Workload(workload) => workload.egress.too_large,
        kind => panic!("{kind:?}"),
    };
    assert_eq!(too_large, [key(&format!("n{MAX_POLICIES:04}"))]);
}

#[test]
fn outbound_allow_neither_closes_nor_opens_pods_to_their_callers() {
    let allow_of_service = of(
        "shop",
        "p",
        json!({"kind": "Service", "name": "none"}),
        json!({"action": "ALLOW", "rules": [{}]}),
    );
    let index = index([
        Object::Pod(pod_in("shop", "a")),
        allow_of_service,
        outbound("shop", "out", allow("a.test")),
        default("shop", "d", "DENY"),
    ]);
    let opened = index.opened();
    assert_eq!(opened.len(), 1);
    assert_eq!(opened[0].2, [&key("a")]);
}
