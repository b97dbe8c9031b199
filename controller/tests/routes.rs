//! Routes over loopback: what the proxies of each namespace are told, and when.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::LazyLock;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::output::Output;
use diy_mesh_testkit::wait::{eventually, soon};
use proto::ResourceType;
use proto::discover_request::Action;
use proto::discover_response::Update;
use support::{Client, Discover, Sandbox, claims, pod_manifest, web};

const WEB: &str = "10.96.0.7:80";

/// A Service in a namespace without endpoints.
fn service(namespace: &str, name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {namespace}}}
spec: {{clusterIP: {ip}, ports: [{{name: http, port: 80}}]}}
"
    )
}

/// A route for `shop/web` in a namespace, with the rest of its rule.
fn route(namespace: &str, rule: &str) -> String {
    format!(
        "apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: r, namespace: {namespace}}}
spec:
  parentRefs: [{{group: '', kind: Service, name: web, namespace: shop, port: 80}}]
  rules: [{rule}]
"
    )
}

fn to(backends: &str) -> String {
    format!("{{backendRefs: [{backends}]}}")
}

/// A client in a namespace.
async fn client_in(sandbox: &Sandbox, namespace: &str) -> Client {
    let mut claims = claims();
    claims["sub"] = format!("system:serviceaccount:{namespace}:web").into();
    claims["kubernetes.io"]["namespace"] = namespace.into();
    Client {
        token: Some(sandbox.issuer.sign(&claims)),
        ..sandbox.client().await
    }
}

async fn subscribed(sandbox: &Sandbox, namespace: &str) -> Discover {
    let discover = client_in(sandbox, namespace).await.discover_routes().await;
    discover.subscribe(WEB, "").await;
    discover
}

/// The backends of the next snapshot, with their weights.
async fn backends(discover: &mut Discover) -> String {
    let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
        panic!("another set of routes requires the whole state")
    };
    let Some(routes) = snapshot.routes else {
        return "no routes".to_owned();
    };
    let backends = routes.rules.iter().flat_map(|rule| &rule.backends);
    let say = |backend: &proto::RouteBackend| match backend.name.as_str() {
        "" => format!("invalid={}", backend.weight),
        name => format!("{name}={}", backend.weight),
    };
    backends.map(say).collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn canary_weights_reach_the_proxies_when_they_change() {
    let canary = service("shop", "canary", "10.96.0.8");
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"])), ("c.yaml", canary)]).await;
    let mut discover = subscribed(&sandbox, "x").await;
    assert_eq!(backends(&mut discover).await, "no routes");
    for weight in [10, 50] {
        let weights = format!(
            "{{name: web, port: 80, weight: {}}}, {{name: canary, port: 80, weight: {weight}}}",
            100 - weight
        );
        sandbox.write("r.yaml", &route("shop", &to(&weights)));
        let expected = format!("shop/web:80={} shop/canary:80={weight}", 100 - weight);
        assert_eq!(backends(&mut discover).await, expected);
    }
    // Endpoints still change by deltas.
    sandbox.write("web.yaml", &web(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(
        discover.said().await,
        format!("{WEB}: +[10.0.0.2:8080] -[]")
    );
    sandbox.remove("r.yaml");
    assert_eq!(backends(&mut discover).await, "no routes");
}

#[tokio::test]
async fn canary_annotations_are_weights_and_invalid_ones_leave_the_service_alone() {
    let canary = |weight: &str| {
        let annotations = format!(
            "annotations: {{diy-service-mesh/canary-of: web, diy-service-mesh/canary-weight: '{weight}'}}"
        );
        let service = service("shop", "canary", "10.96.0.8");
        service.replace(
            "namespace: shop}",
            &format!("namespace: shop, {annotations}}}"),
        )
    };
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = subscribed(&sandbox, "x").await;
    assert_eq!(backends(&mut discover).await, "no routes");
    let mut client = sandbox.client().await;
    let mut watch = client.watch(&["shop/web"]).await;
    let mut shares = async || loop {
        let message = soon(watch.message()).await;
        if let Some(service) = message.unwrap().unwrap().service {
            let canaries = service.canaries.iter();
            break canaries
                .map(|canary| format!("{} {}", canary.name, canary.weight))
                .collect::<Vec<_>>();
        }
    };
    assert_eq!(shares().await, [""; 0]);
    for weight in [10, 0, 100] {
        sandbox.write("c.yaml", &canary(&weight.to_string()));
        let expected = format!("shop/web:80={} shop/canary:80={weight}", 100 - weight);
        assert_eq!(backends(&mut discover).await, expected);
        assert_eq!(shares().await, [format!("canary {weight}")]);
    }
    sandbox.write("c.yaml", &canary("101"));
    let problem = "diy-service-mesh/canary-weight: \"101\" is not an integer from 0 to 100";
    logged(problem).await;
    assert_eq!(backends(&mut discover).await, "no routes");
    assert_eq!(shares().await, [""; 0]);
    sandbox.write("c.yaml", &canary("20"));
    let expected = "shop/web:80=80 shop/canary:80=20";
    assert_eq!(backends(&mut discover).await, expected);
    assert_eq!(shares().await, ["canary 20"]);
    sandbox.write("r.yaml", &route("shop", &to("{name: web, port: 80}")));
    assert_eq!(backends(&mut discover).await, "shop/web:80=1");
    assert_eq!(shares().await, [""; 0], "an HTTPRoute takes precedence");
}

#[tokio::test]
async fn consumer_routes_are_for_the_clients_of_their_namespace_only() {
    let own = service("consumer", "own", "10.96.0.8");
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"])), ("own.yaml", own)]).await;
    let mut consumer = subscribed(&sandbox, "consumer").await;
    let mut other = subscribed(&sandbox, "other").await;
    assert_eq!(backends(&mut consumer).await, "no routes");
    assert_eq!(backends(&mut other).await, "no routes");
    sandbox.write("c.yaml", &route("consumer", &to("{name: own, port: 80}")));
    assert_eq!(backends(&mut consumer).await, "consumer/own:80=1");
    // The next message of the other client is about the producer's route.
    sandbox.write("p.yaml", &route("shop", &to("{name: web, port: 80}")));
    assert_eq!(backends(&mut other).await, "shop/web:80=1");
    sandbox.remove("c.yaml");
    assert_eq!(backends(&mut consumer).await, "shop/web:80=1");
}

#[tokio::test]
async fn backend_of_another_namespace_requires_a_grant() {
    let canary = service("far", "canary", "10.96.0.8");
    let backend = "{name: canary, namespace: far, port: 80}";
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        ("far.yaml", canary),
        ("r.yaml", route("shop", &to(backend))),
    ])
    .await;
    let mut discover = subscribed(&sandbox, "x").await;
    assert_eq!(backends(&mut discover).await, "invalid=1");
    for version in ["v1", "v1beta1"] {
        let grant = |from: &str, to: &str| {
            format!(
                "apiVersion: gateway.networking.k8s.io/{version}
kind: ReferenceGrant
metadata: {{name: g, namespace: far}}
spec:
  from: [{{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: {from}}}]
  to: [{{group: '', kind: Service, name: {to}}}]
"
            )
        };
        // A grant for another namespace or Service has no effect, and no message.
        sandbox.write("g.yaml", &grant("x", "canary"));
        sandbox.write("g.yaml", &grant("shop", "another"));
        sandbox.write("g.yaml", &grant("shop", "canary"));
        assert_eq!(backends(&mut discover).await, "far/canary:80=1");
        sandbox.remove("g.yaml");
        assert_eq!(backends(&mut discover).await, "invalid=1");
    }
}

#[tokio::test]
async fn consumer_may_refer_to_the_parent_but_not_to_its_neighbors() {
    let neighbor = service("shop", "neighbor", "10.96.0.8");
    let both =
        "{name: web, namespace: shop, port: 80}, {name: neighbor, namespace: shop, port: 80}";
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        ("n.yaml", neighbor),
        ("r.yaml", route("consumer", &to(both))),
    ])
    .await;
    let mut discover = subscribed(&sandbox, "consumer").await;
    assert_eq!(backends(&mut discover).await, "shop/web:80=1 invalid=1");
}

#[tokio::test]
async fn backend_becomes_valid_when_its_service_and_port_exist() {
    let backend = to("{name: canary, port: 80}");
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        ("r.yaml", route("shop", &backend)),
    ])
    .await;
    let mut discover = subscribed(&sandbox, "x").await;
    assert_eq!(backends(&mut discover).await, "invalid=1");
    let canary = service("shop", "canary", "10.96.0.8");
    sandbox.write("c.yaml", &canary);
    assert_eq!(backends(&mut discover).await, "shop/canary:80=1");
    sandbox.write("c.yaml", &canary.replace("port: 80", "port: 81"));
    assert_eq!(backends(&mut discover).await, "invalid=1");
    let external = "type: ExternalName, externalName: example.com, ports: [{port: 80}]";
    let external = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: canary, namespace: shop}}\nspec: {{{external}}}\n"
    );
    sandbox.write("c.yaml", &external);
    // Still invalid: the next message is about the repaired Service.
    sandbox.write("c.yaml", &canary);
    assert_eq!(backends(&mut discover).await, "shop/canary:80=1");
}

#[tokio::test]
async fn invalid_route_does_not_disturb_others() {
    let invalid = "{matches: [{path: {type: RegularExpression, value: '('}}], backendRefs: [{name: web, port: 80, weight: 3}]}";
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        (
            "bad.yaml",
            route("shop", invalid).replace("name: r,", "name: bad,"),
        ),
        (
            "r.yaml",
            route("shop", &to("{name: web, port: 80, weight: 2}")),
        ),
    ])
    .await;
    let mut discover = subscribed(&sandbox, "x").await;
    assert_eq!(backends(&mut discover).await, "shop/web:80=2");
    let valid = invalid.replace("'('", "'/a.*'");
    sandbox.write(
        "bad.yaml",
        &route("shop", &valid).replace("name: r,", "name: bad,"),
    );
    // In the order of their names.
    assert_eq!(backends(&mut discover).await, "shop/web:80=3 shop/web:80=2");
}

#[tokio::test]
async fn routes_are_sent_with_all_of_their_fields_and_only_to_proxies_that_announce_them() {
    let rule = "{name: all, matches: [{path: {value: /a}, method: GET, headers: [{name: H, value: x, type: RegularExpression}],
      queryParams: [{name: Q, value: y}]}], timeouts: {request: 2s, backendRequest: 1s}, retry: {codes: [503], attempts: 2, backoff: 10ms},
      filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: S, value: t}], add: [{name: a, value: b}], remove: [R]}}],
      backendRefs: [{name: web, port: 80, weight: 5, filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: s, value: t}]}}]}]}";
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        ("r.yaml", route("shop", rule)),
    ])
    .await;
    let mut discover = subscribed(&sandbox, "x").await;
    let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
        panic!("a snapshot comes first")
    };
    let routes = snapshot.routes.unwrap();
    assert!(!routes.grpc);
    let one = &routes.matches[0];
    let path = one.path.as_ref().unwrap().kind.clone();
    assert_eq!(path, Some(proto::path_match::Kind::Prefix("/a".into())));
    assert_eq!((&*one.method, one.rule), ("GET", 0));
    let (header, query) = (&one.headers[0], &one.query[0]);
    assert_eq!((&*header.name, &*query.name), ("h", "Q"));
    assert_eq!(
        header.kind,
        Some(proto::field_match::Kind::Regex("x".into()))
    );
    assert_eq!(
        query.kind,
        Some(proto::field_match::Kind::Exact("y".into()))
    );
    let rule = &routes.rules[0];
    assert_eq!(rule.name, "HTTPRoute shop/r/all");
    assert_eq!(
        (rule.request_timeout, rule.backend_request_timeout),
        (2000, 1000)
    );
    let retry = rule.retry.as_ref().unwrap();
    assert_eq!(
        (&retry.statuses[..], retry.attempts, retry.backoff),
        (&[503][..], 2, 10)
    );
    let Some(proto::route_filter::Kind::ResponseHeaders(modifier)) = &rule.filters[0].kind else {
        panic!("{:?}", rule.filters)
    };
    let names = (
        &*modifier.set[0].name,
        &*modifier.add[0].value,
        &*modifier.remove[0],
    );
    assert_eq!(names, ("S", "b", "R"));
    assert_eq!(rule.backends[0].filters.len(), 1);

    let mut earlier = client_in(&sandbox, "x").await.discover().await;
    earlier.subscribe(WEB, "").await;
    assert_eq!(backends(&mut earlier).await, "no routes");
}

#[tokio::test]
async fn backend_resource_has_what_a_proxy_needs_to_balance() {
    let with_affinity =
        web(&["10.0.0.1"]).replace("clusterIP:", "sessionAffinity: ClientIP, clusterIP:");
    let sandbox = Sandbox::start(&[("web.yaml", with_affinity)]).await;
    let mut discover = subscribed(&sandbox, "x").await;
    discover.answer().await.unwrap();
    for (name, known) in [
        ("shop/web:80", true),
        ("shop/web:81", false),
        ("shop/none:80", false),
    ] {
        discover.subscribe_to(ResourceType::Backend, name).await;
        let answer = discover.answer().await.unwrap();
        assert_eq!(answer.name, name);
        match answer.update.unwrap() {
            Update::Snapshot(snapshot) if known => {
                assert_eq!(snapshot.app_protocol, "http");
                assert_eq!(snapshot.session_affinity_seconds, 10_800);
                assert_eq!(snapshot.endpoints[0].address, "10.0.0.1:8080");
                assert_eq!(
                    snapshot.endpoints[0].identity,
                    "spiffe://cluster.local/ns/shop/sa/web"
                );
                assert!(snapshot.routes.is_none());
            }
            Update::Unknown(_) if !known => {}
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn policy_reaches_clients_of_all_namespaces_with_destinations_and_backends() {
    let policy = |requests: &str| {
        format!(
            "apiVersion: diy-service-mesh.dev/v1alpha1
kind: TrafficPolicy
metadata: {{name: p, namespace: shop}}
spec:
  targetRefs: [{{group: '', kind: Service, name: web}}]
  connections: {{maxRequests: {requests}}}
  timeouts: {{request: 5s}}
  faults: [{{matches: [{{path: {{value: /a}}}}], abort: {{status: 503, percent: 50}}}}]
"
        )
    };
    log_of_process();
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = subscribed(&sandbox, "x").await;
    let snapshot = async |discover: &mut Discover, name: &str| loop {
        let answer = discover.answer().await.unwrap();
        let Some(Update::Snapshot(snapshot)) = answer.update else {
            panic!("another policy requires the whole state")
        };
        if answer.name == name {
            break snapshot;
        }
    };
    let max_requests = |snapshot: &proto::Snapshot| {
        let policy = snapshot.policy.as_ref();
        policy.and_then(|policy| policy.connections?.max_requests)
    };
    let first = snapshot(&mut discover, WEB).await;
    assert_eq!((max_requests(&first), first.routes), (None, None));
    sandbox.write("p.yaml", &policy("7"));
    let second = snapshot(&mut discover, WEB).await;
    assert_eq!(max_requests(&second), Some(7));
    assert_eq!(second.policy.unwrap().name, "TrafficPolicy shop/p");
    let routes = second.routes.unwrap();
    assert_eq!(
        (routes.matches.len(), routes.rules[0].request_timeout),
        (1, 5_000)
    );
    assert!(routes.rules[0].to_destination);
    assert_eq!(routes.rules[0].backends[0].name, "shop/web:80");
    let fault = &routes.faults[0];
    let share = proto::Share {
        numerator: 50,
        denominator: 100,
    };
    assert_eq!((fault.abort_status, fault.aborted), (503, Some(share)));
    let path = fault.matches[0].path.as_ref().unwrap().kind.clone();
    assert_eq!(path, Some(proto::path_match::Kind::Prefix("/a".into())));
    let backend = ResourceType::Backend;
    discover.subscribe_to(backend, "shop/web:80").await;
    let of_backend = snapshot(&mut discover, "shop/web:80").await;
    assert_eq!(
        (max_requests(&of_backend), of_backend.routes),
        (Some(7), None)
    );
    // An invalid section has no effect, and the rest applies.
    sandbox.write("p.yaml", &policy("0"));
    let problem = "spec.connections.maxRequests: \"0\" is not from 1 to 1000000";
    let rejected = format!("{problem}; the section has no effect");
    logged(&rejected).await;
    assert_eq!(
        max_requests(&snapshot(&mut discover, "shop/web:80").await),
        None
    );
    sandbox.write("p.yaml", &policy("8"));
    assert_eq!(
        max_requests(&snapshot(&mut discover, "shop/web:80").await),
        Some(8)
    );
}

/// The log of all controllers of this process.
fn log_of_process() -> &'static Output {
    static LOG: LazyLock<Output> = LazyLock::new(|| {
        let log = Output::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false);
        lines.with_writer(move || writer.clone()).init();
        log
    });
    &LOG
}

/// The line of the log with this text.
async fn logged(text: &str) -> String {
    eventually(text, async || {
        let log = log_of_process().text();
        let line = log.lines().find(|line| line.contains(text));
        line.map(str::to_owned).ok_or("no line")
    })
    .await
}

#[tokio::test]
async fn conditions_tell_which_proxies_reject_routes_or_do_not_announce_that_they_apply_them() {
    log_of_process();
    // The pods of the tokens.
    let pod = |name: &str, uid: &str| {
        let pod = pod_manifest(name, &format!("10.0.1.{uid}"));
        let uid = format!("namespace: shop, uid: '{uid}'}}");
        pod.replacen("namespace: shop}", &uid, 1)
    };
    let pods = pod("web-1", "1") + &pod("web-2", "2");
    let named = |name: &str| {
        let route = route("shop", &to("{name: web, port: 80}"));
        route.replace("name: r,", &format!("name: {name},"))
    };
    let sandbox = Sandbox::start(&[
        ("web.yaml", web(&["10.0.0.1"])),
        ("pods.yaml", pods),
        ("r.yaml", named("programmed")),
    ])
    .await;
    let mut current = sandbox.pod(2).await;
    let mut current = current.discover_routes().await;
    let mut old = sandbox.pod(1).await.discover().await;
    old.subscribe(WEB, "").await;
    backends(&mut old).await;
    current.subscribe(WEB, "").await;
    let answer = current.answer().await.unwrap();
    let acknowledgement = proto::Acknowledgement {
        name: answer.name,
        version: answer.version,
        rejection: "rule 0 (HTTPRoute shop/programmed): unknown".to_owned(),
        ..proto::Acknowledgement::default()
    };
    current.send(Action::Acknowledgement(acknowledgement)).await;
    let line = logged("Programmed=False").await;
    let expected = "HTTPRoute shop/programmed, parent Service shop/web:80: Accepted=True; \
        ResolvedRefs=True; diy-service-mesh.dev/Programmed=False, Rejected: \
        0 of 2 pods have generation 0; not: \
        web-1 (the proxy is of an older release: restart the pod), \
        web-2 (rejected: rule 0 (HTTPRoute shop/programmed): unknown)";
    assert!(line.contains(expected), "{line}");
    let (_, metrics) = sandbox.admin("/metrics").await;
    for capability in ["routes", "policy"] {
        let expected = format!("streams_without_capability{{capability=\"{capability}\"}} 1\n");
        assert!(metrics.contains(&expected), "{metrics}");
    }
}
