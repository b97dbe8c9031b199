//! Verdicts on calls, of policies and pods in files.

use serde_json::{Value, json};

use super::*;
use crate::files;

/// A Deployment whose pods have a proxy, a Service for it, and policies.
fn objects(annotations: Value, policies: &[Value]) -> Vec<Value> {
    let mut annotations = annotations;
    annotations["diy-service-mesh/inject"] = "true".into();
    let template = json!({
        "metadata": {"labels": {"app": "web"}, "annotations": annotations},
        "spec": {"serviceAccountName": "web", "containers": [
            {"name": "app", "ports": [{"name": "http", "containerPort": 8080}]},
        ]},
    });
    let policy = |(at, spec): (usize, &Value)| {
        json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
            "metadata": {"name": format!("p{at}"), "namespace": "shop"}, "spec": spec})
    };
    let mut objects = vec![
        json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "web-v1", "namespace": "shop"}, "spec": {"template": template}}),
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"selector": {"app": "web"}, "clusterIP": "10.0.0.1",
                "ports": [{"port": 80, "targetPort": "http"}]}}),
    ];
    objects.extend(policies.iter().enumerate().map(policy));
    objects
}

/// Who may call the pods of the Service.
pub(crate) fn web(annotations: Value, policies: &[Value]) -> Vec<Pod> {
    let mut objects = objects(annotations, policies);
    assert_eq!(files::inject(&mut objects, "service-mesh"), [""; 0]);
    let (index, problems) =
        diy_mesh_controller::explain::index(&objects, "service-mesh", TRUST_DOMAIN);
    assert_eq!(problems, [""; 0]);
    pods(&index, &"shop/web".parse().unwrap()).unwrap()
}

/// A policy for all pods of the namespace.
fn policy(action: &str, rules: Value) -> Value {
    json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "action": action, "rules": rules})
}

fn call(from: &str, path: &str) -> Call {
    let head = Head {
        method: "GET".to_owned(),
        path: Path::Known(path.to_owned()),
        host: Some("web".to_owned()),
        fields: Some(vec![]),
        token: Claims::Absent,
    };
    Call {
        caller: from.parse().unwrap(),
        address: Some([10, 1, 0, 1].into()),
        request: Some(head).filter(|_| !path.is_empty()),
    }
}

/// The verdict and the reason, with what the policies under audit would do.
fn told(pods: &[Pod], call: &Call) -> String {
    let [(8080, verdict, names)] = &verdicts(pods, call)[..] else {
        panic!("one port of one kind of pods")
    };
    assert_eq!(names, &["shop/web-v1"]);
    let audit = verdict.audit.as_deref();
    let audit = audit.map_or(String::new(), |audit| format!("; audit: {audit}"));
    format!("{:?}: {}{audit}", verdict.verdict, verdict.reason)
}

const NO_POLICY: &str = "Allowed: no ALLOW policy covers the port, and no DENY rule matches";

#[test]
fn tells_the_policy_the_rule_and_the_field() {
    let accounts = json!([{"type": "ServiceAccount", "serviceAccount": {"name": "cart"}}]);
    let allow = policy(
        "ALLOW",
        json!([{"sources": accounts, "requests": [{"paths": [{"type": "PathPrefix", "value": "/items"}]}]}]),
    );
    let pods = web(json!({}), &[allow]);
    let name = "AuthorizationPolicy shop/p0";
    let nearest = format!("Denied: {name}: no rule matches, the nearest is rules[0] but for its");
    for (from, path, expected) in [
        (
            "shop/cart",
            "/items/1?x",
            format!("Allowed: {name}, rules[0]"),
        ),
        ("shop/cart", "/admin", format!("{nearest} paths")),
        ("shop/other", "/items", format!("{nearest} sources")),
        (
            "spiffe://other/ns/shop/sa/cart",
            "/items",
            format!("{nearest} sources"),
        ),
        ("unauthenticated", "/items", format!("{nearest} sources")),
        ("shop/cart", "", format!("{nearest} requests")),
    ] {
        let path = path.split('?').next().unwrap();
        assert_eq!(told(&pods, &call(from, path)), expected, "{from} {path}");
    }
    let denied = &verdicts(&pods, &call("shop/cart", "/admin"))[0].1;
    let (policy, rule, field) = (denied.policy.as_deref(), denied.rule, denied.field);
    assert_eq!((policy, rule, field), (Some(name), Some(0), Some("paths")));
}

#[test]
fn settings_of_the_pod_count_as_the_injector_reads_them() {
    let deny = policy(
        "DENY",
        json!([{"networkAttributes": {"ports": [8080]},
        "requests": [{"paths": [{"type": "Exact", "value": "/admin"}]}]}]),
    );
    let told = |annotations: Value, from: &str, path: &str| {
        told(
            &web(annotations, std::slice::from_ref(&deny)),
            &call(from, path),
        )
    };
    let denied = "Denied: AuthorizationPolicy shop/p0, rules[0]";
    assert_eq!(told(json!({}), "shop/cart", "/"), NO_POLICY);
    assert_eq!(told(json!({}), "shop/cart", "/x/..//ADMIN/"), denied);
    // Bytes may be a request for any path.
    let opaque = json!({"diy-service-mesh/opaque-ports": "8080"});
    assert_eq!(told(opaque, "shop/cart", "/"), denied);
    let strict = json!({"diy-service-mesh/inbound": "strict"});
    assert_eq!(
        told(strict, "unauthenticated", "/"),
        "Denied: the pod is strict: mutual TLS is required"
    );
    let bypassed = json!({"diy-service-mesh/skip-inbound-ports": "8080"});
    assert_eq!(
        told(bypassed, "shop/cart", "/admin"),
        "Allowed: the port bypasses the proxy"
    );
}

#[test]
fn policies_under_audit_deny_nothing_and_are_told() {
    let mut nobody = policy("ALLOW", json!([]));
    nobody["mode"] = "Audit".into();
    let pods = web(json!({}), &[nobody]);
    let expected = format!("{NO_POLICY}; audit: AuthorizationPolicy shop/p0: no rule matches");
    assert_eq!(told(&pods, &call("shop/cart", "/")), expected);
}

#[test]
fn verdict_that_depends_on_what_is_not_known_is_no_verdict() {
    let block = json!([{"type": "IPBlock", "ipBlock": "10.0.0.0/8"}]);
    let inside = json!([{"sources": block}]);
    let outside = json!([{"notSources": block}]);
    let mut unknown = call("shop/cart", "/");
    unknown.address = None;
    for (action, rules, known) in [
        ("ALLOW", &inside, Outcome::Allowed),
        ("ALLOW", &outside, Outcome::Denied),
        ("DENY", &inside, Outcome::Denied),
        ("DENY", &outside, Outcome::Allowed),
    ] {
        let pods = web(json!({}), &[policy(action, rules.clone())]);
        let verdict = |call: &Call| judge(&pods[0], 8080, call).verdict;
        assert_eq!(verdict(&call("shop/cart", "/")), known, "{action} {rules}");
        assert_eq!(verdict(&unknown), Outcome::Unknown, "{action} {rules}");
    }
    let requests =
        |request: Value| json!([{"networkAttributes": {"ports": [8080]}, "requests": [request]}]);
    for condition in [
        json!({"hosts": ["web"]}),
        json!({"headers": [{"name": "x-role", "type": "Present"}]}),
        json!({"paths": [{"type": "Exact", "value": "/"}]}),
    ] {
        for action in ["ALLOW", "DENY"] {
            let pods = web(json!({}), &[policy(action, requests(condition.clone()))]);
            let mut call = call("shop/cart", "/");
            let head = call.request.as_mut().unwrap();
            (head.host, head.fields, head.path) = (None, None, Path::Unknown);
            let verdict = judge(&pods[0], 8080, &call).verdict;
            assert_eq!(verdict, Outcome::Unknown, "{action} {condition}");
        }
    }
    // Another condition decides.
    let other = json!({"hosts": ["web"], "methods": ["POST"]});
    let pods = web(json!({}), &[policy("ALLOW", requests(other))]);
    let mut call = call("shop/cart", "/");
    call.request.as_mut().unwrap().host = None;
    assert_eq!(judge(&pods[0], 8080, &call).verdict, Outcome::Denied);
}

#[test]
fn callers_and_targets_are_parsed() {
    for text in [
        "",
        "shop",
        "shop/",
        "/web",
        "a/b/c",
        "shop/web:0x50",
        "shop/web:65536",
        "shop/web:",
    ] {
        assert!(text.parse::<Target>().is_err(), "{text}");
    }
    let target: Target = "shop/web:80".parse().unwrap();
    assert_eq!((target.key, target.port), (Key::new("shop", "web"), 80));
    for text in ["", "shop", "Shop/web", "a/b/c", "spiffe://x"] {
        assert!(text.parse::<Caller>().is_err(), "{text}");
    }
    for text in ["shop/web", "unauthenticated", "spiffe://a/ns/shop/sa/web"] {
        assert_eq!(text.parse::<Caller>().unwrap().to_string(), text);
    }
}

#[test]
fn claims_decide_where_a_policy_asks_for_a_token() {
    let keys = r#"{"keys": [{"kty": "EC", "crv": "P-256",
        "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
        "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}"#;
    let issuing = |action: &str| {
        let claims = json!([{"claim": "groups", "type": "Exact", "value": "ops"}]);
        let mut policy = policy(
            action,
            json!([{
                "requests": [{"claims": claims}], "networkAttributes": {"ports": [8080]},
            }]),
        );
        policy["issuers"] = json!([{
            "issuer": "https://id.example.com",
            "audiences": ["shop"],
            "keys": {"type": "Inline", "inline": keys},
        }]);
        policy
    };
    let with = |token: Claims| {
        let mut call = call("shop/cart", "/");
        call.request.as_mut().expect("a request").token = token;
        call
    };
    let known = |group: &str| Claims::Known(json!({"groups": [group]}));
    for (token, allow, deny) in [
        (known("ops"), "Allowed", "Denied"),
        (known("dev"), "Denied", "Allowed"),
        (Claims::Absent, "Denied", "Denied"),
        (Claims::Unknown, "Unknown", "Unknown"),
    ] {
        for (action, expected) in [("ALLOW", allow), ("DENY", deny)] {
            let told = told(&web(json!({}), &[issuing(action)]), &with(token.clone()));
            assert!(told.starts_with(expected), "{action} {token:?}: {told}");
        }
    }
    // The token of a call that was seen is not known: it may be one that is refused.
    let open = policy("ALLOW", json!([{}]));
    let told = told(
        &web(json!({}), &[issuing("ALLOW"), open]),
        &with(Claims::Unknown),
    );
    let reason = "the token is not valid for any of its issuers";
    assert!(
        told.starts_with("Unknown") && told.contains(reason),
        "{told}"
    );
}

/// A policy with a server that is asked about requests with this condition.
fn external(server: &str, condition: Value) -> Value {
    let ports = json!({"ports": [8080]});
    let rules = json!([{"networkAttributes": ports, "requests": [condition]}]);
    let mut policy = policy("ExternalAuth", rules);
    let backend = json!({"name": server, "namespace": "auth", "port": 9000});
    policy["externalAuth"] = json!({"protocol": "GRPC", "backendRef": backend});
    policy
}

#[test]
fn servers_decide_about_what_is_allowed_otherwise() {
    let path = |value: &str| json!({"paths": [{"type": "PathPrefix", "value": value}]});
    let deny = policy(
        "DENY",
        json!([{"sources": [
            {"type": "ServiceAccount", "serviceAccount": {"name": "bot"}},
        ]}]),
    );
    let items = external("one", path("/items"));
    let pods = web(json!({}), &[deny, items, external("two", path("/items/1"))]);
    let [one, two] = [("one", 1), ("two", 2)].map(|(server, policy)| {
        format!("auth/{server}:9000 allows it (AuthorizationPolicy shop/p{policy})")
    });
    let denied = "Denied: AuthorizationPolicy shop/p0, rules[0]".to_owned();
    for (from, path, expected) in [
        ("shop/cart", "/", NO_POLICY.to_owned()),
        ("shop/cart", "/items", format!("Asks: allowed if {one}")),
        (
            "shop/cart",
            "/items/1",
            format!("Asks: allowed if {one} and {two}"),
        ),
        ("shop/bot", "/items", denied),
        // A connection that carries no HTTP.
        (
            "shop/cart",
            "",
            "Denied: AuthorizationPolicy shop/p1, rules[0]".to_owned(),
        ),
    ] {
        assert_eq!(told(&pods, &call(from, path)), expected, "{from} {path}");
    }
    let asks = &verdicts(&pods, &call("shop/cart", "/items"))[0].1;
    assert_eq!(asks.policy.as_deref(), Some("AuthorizationPolicy shop/p1"));
    assert_eq!(json!(asks)["verdict"], "asks");
}

#[test]
fn whether_a_server_is_asked_may_depend_on_what_is_not_known() {
    let pods = web(json!({}), &[external("one", json!({"hosts": ["web"]}))]);
    let mut call = call("shop/cart", "/");
    call.request.as_mut().unwrap().host = None;
    let expected = "Unknown: allowed if auth/one:9000 allows it (AuthorizationPolicy shop/p0)";
    assert_eq!(told(&pods, &call), expected);
}

/// The pods of a Service with an HTTPRoute of these rules.
fn routed(rules: Value) -> Vec<Pod> {
    let mut objects = objects(json!({}), &[]);
    let parent = json!({"group": "", "kind": "Service", "name": "web"});
    objects.push(
        json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"parentRefs": [parent], "rules": rules}}),
    );
    objects.push(json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "auth", "namespace": "shop"},
        "spec": {"selector": {"app": "auth"}, "clusterIP": "10.0.0.2", "ports": [{"port": 80}]}}));
    assert_eq!(files::inject(&mut objects, "service-mesh"), [""; 0]);
    let (index, problems) =
        diy_mesh_controller::explain::index(&objects, "service-mesh", TRUST_DOMAIN);
    assert_eq!(problems, [""; 0]);
    pods(&index, &"shop/web".parse().unwrap()).unwrap()
}

#[test]
fn servers_of_routes_are_asked_for_certain_if_each_rule_has_one() {
    let auth = |name: &str| {
        let backend = json!({"name": name, "port": 80});
        json!([{"type": "ExternalAuth", "externalAuth": {"protocol": "GRPC", "backendRef": backend}}])
    };
    let admin = json!([{"path": {"type": "PathPrefix", "value": "/admin"}}]);
    let web = json!([{"name": "web", "port": 80}]);
    let protected = json!({"matches": admin, "filters": auth("auth"), "backendRefs": web});
    let open = json!({"backendRefs": web});
    let all = json!({"filters": auth("auth"), "backendRefs": web});
    let none = json!({"filters": auth("none"), "backendRefs": web});
    let call = |path| call("shop/cart", path);
    let told = |rules: Value, path| told(&routed(rules), &call(path));
    let reason = "allowed if shop/auth:80 allows it (HTTPRoute shop/web)";
    let both = json!([protected, open]);
    assert_eq!(told(both.clone(), "/admin"), format!("Unknown: {reason}"));
    assert_eq!(
        told(json!([protected, all]), "/"),
        format!("Asks: {reason}")
    );
    let refused = "Asks: allowed if no server allows it (HTTPRoute shop/web)";
    assert_eq!(told(json!([none]), "/"), refused);
    // A connection that carries no HTTP.
    let denied = "Denied: HTTPRoute shop/web, rules[0]";
    assert_eq!(told(both, ""), denied);
}

fn outbound(spec: Value) -> Value {
    let mut spec = spec;
    spec["direction"] = "Outbound".into();
    spec
}

#[test]
fn calls_to_outside_are_judged_by_outbound_policies_only() {
    let names = json!([{"type": "Host", "host": "*.example.com"}]);
    let blocks = json!([{"type": "IPBlock", "ipBlock": "192.0.2.0/24"}]);
    let never = json!([{"type": "IPBlock", "ipBlock": "198.51.100.0/24"}]);
    let at_443 = json!({"ports": [443]});
    let pods = web(
        json!({}),
        &[
            policy("DENY", json!([{}])),
            outbound(policy(
                "ALLOW",
                json!([
                    {"destinations": names, "networkAttributes": at_443},
                    {"destinations": blocks},
                ]),
            )),
            outbound(policy("DENY", json!([{"destinations": never}]))),
        ],
    );
    let told = |to: &str, address: Option<[u8; 4]>| {
        let mut to: Destination = to.parse().unwrap();
        to.address = to.address.or(address.map(IpAddr::from));
        let [(port, verdict, names)] = &outbound_verdicts(&pods, &to)[..] else {
            panic!("one kind of pods")
        };
        assert_eq!(
            (*port, &**names),
            (to.port.into(), &["shop/web-v1".to_owned()][..])
        );
        (
            verdict.verdict,
            verdict.policy.clone().unwrap_or_default(),
            verdict.rule,
        )
    };
    let allowed = |rule| {
        (
            Outcome::Allowed,
            "AuthorizationPolicy shop/p1".to_owned(),
            Some(rule),
        )
    };
    let elsewhere = Some([203, 0, 113, 1]);
    assert_eq!(told("API.example.com:443", elsewhere), allowed(0));
    assert_eq!(told("192.0.2.7:5432", None), allowed(1));
    assert_eq!(told("api.example.com:80", elsewhere).0, Outcome::Denied);
    assert_eq!(told("203.0.113.1:443", None).0, Outcome::Denied);
    let denied = told("api.example.com:443", Some([198, 51, 100, 1]));
    let policy = "AuthorizationPolicy shop/p2";
    assert_eq!((denied.0, &*denied.1), (Outcome::Denied, policy));
    // Without the address, the DENY may match.
    let unknown = told("api.example.com:443", None);
    assert_eq!((unknown.0, &*unknown.1), (Outcome::Unknown, policy));
    assert_eq!(told("other.test:443", None).0, Outcome::Unknown);
    // Calls to the pods are for the other policy.
    let (_, verdict, _) = &verdicts(&pods, &call("shop/web", ""))[0];
    assert_eq!(
        verdict.policy.as_deref(),
        Some("AuthorizationPolicy shop/p0")
    );
}

#[test]
fn default_decides_about_calls_to_outside_without_policies() {
    let to = "[2001:db8::1]:443".parse().unwrap();
    let told = |policies: &[Value]| {
        let mut rows = outbound_verdicts(&web(json!({}), policies), &to);
        let (_, verdict, _) = rows.remove(0);
        (verdict.verdict, verdict.policy)
    };
    let default = json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "defaultAction": "DENY"});
    assert_eq!(told(&[]), (Outcome::Allowed, None));
    assert_eq!(
        told(std::slice::from_ref(&default)),
        (Outcome::Allowed, None)
    );
    let policy = Some("AuthorizationPolicy shop/p0".to_owned());
    assert_eq!(told(&[outbound(default)]), (Outcome::Denied, policy));
    let mut pods = web(json!({}), &[]);
    pods[0].workload = None;
    assert_eq!(judge_outbound(&pods[0], &to).verdict, Outcome::Unknown);
    pods[0].identity.clear();
    assert_eq!(judge_outbound(&pods[0], &to).reason, "the pod has no proxy");
}

#[test]
fn destinations_have_a_name_or_an_address_and_a_port() {
    let parsed = |text: &str| text.parse::<Destination>().ok();
    let of = |host: Option<&str>, address: Option<&str>, port| {
        Some(Destination {
            host: host.map(str::to_owned),
            address: address.map(|text| text.parse().unwrap()),
            port,
        })
    };
    assert_eq!(parsed("API.test:443"), of(Some("api.test"), None, 443));
    assert_eq!(parsed("192.0.2.1:80"), of(None, Some("192.0.2.1"), 80));
    assert_eq!(parsed("[fd00::1]:80"), of(None, Some("fd00::1"), 80));
    for text in [
        "api.test",
        "api.test:0",
        ":443",
        "a_b c:1",
        "192.0.2.1",
        "api.test:65536",
    ] {
        assert_eq!(parsed(text), None, "{text}");
    }
}
