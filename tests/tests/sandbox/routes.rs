//! Routes in a sandbox: weights, matches, errors, grants, and routes of the client's namespace.

use std::time::Instant;

use diy_mesh_tests::routes::{binomial_bounds, canary, grant, http_route, rule, servers};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, controller_logs, repeat_during, request_until, response_until, shell,
    single_pod, versions, wait_for_line, with_mesh,
};

#[test]
fn requests_follow_weights_and_matches() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    let v2 = "{name: web-v2, port: 80}";
    let rules = [
        rule("{headers: [{name: X-Canary, value: 'yes'}]}", v2),
        rule("{queryParams: [{name: version, value: '2'}]}", v2),
        rule("{path: {type: PathPrefix, value: /other}}", v2),
        "{matches: [{path: {value: /moved}}], filters: [{type: RequestRedirect, \
         requestRedirect: {port: 8443}}]}"
            .to_owned(),
        canary(10),
    ];
    let route = http_route("shop", "web", "shop", &format!("[{}]", rules.join(", ")));
    sandbox.apply(&route).unwrap();
    // No rule matches: the proxy responds, not the application.
    response_until(&sandbox, &client, "/none", "", "404 x-mesh-error");
    for _ in 0..20 {
        let field = "x-canary: yes\\r\\n";
        response_until(&sandbox, &client, "/hello", field, "200 Version: 2.0");
    }
    response_until(
        &sandbox,
        &client,
        "/hello?version=2",
        "",
        "200 Version: 2.0",
    );
    // The application responds.
    response_until(
        &sandbox,
        &client,
        "/other/path",
        "",
        "404 this server answers /hello",
    );
    // Dumps name the route, also of a response by the proxy. Some requests have no dump.
    let is_redirect =
        |line: &String| line.contains(" by HTTPRoute shop/web") && !line.contains(" to shop/web");
    let is_dumped = |response: &str| {
        let view = sandbox.view();
        response.starts_with("HTTP/1.1 302 ")
            && view.lines(&client, "proxy").iter().any(is_redirect)
    };
    let service = ("web.shop", 80);
    request_until(&sandbox, &client, "GET /moved", service, "", is_dumped);
    let [first, second] = versions(&sandbox, &client, 400);
    assert_eq!(first + second, 400, "all requests succeed");
    let bounds = binomial_bounds(400, 0.1);
    assert!(
        bounds.contains(&second),
        "{second} of 400, expected {bounds:?}"
    );
    let accepted = "HTTPRoute shop/web, parent Service shop/web:80: Accepted=True";
    controller_logs(&sandbox, &[accepted, "ResolvedRefs=True"]);
    // All requests follow a changed weight.
    let route = http_route("shop", "web", "shop", &format!("[{}]", canary(100)));
    sandbox.apply(&route).unwrap();
    response_until(&sandbox, &client, "/other/path", "", "404 x-mesh-error");
    assert_eq!(versions(&sandbox, &client, 50), [0, 50]);
    // Without the route, the Service has its own pods again.
    sandbox.delete("HTTPRoute", "shop", "web").unwrap();
    response_until(
        &sandbox,
        &client,
        "/none",
        "",
        "404 this server answers /hello",
    );
    assert_eq!(versions(&sandbox, &client, 50), [50, 0]);
}

#[test]
fn canary_annotations_shift_requests_without_a_failure() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    let weight = |percent: &str| {
        let service = format!(
            "
apiVersion: v1
kind: Service
metadata:
  name: web-v2
  namespace: shop
  annotations: {{diy-service-mesh/canary-of: web, diy-service-mesh/canary-weight: '{percent}'}}
spec: {{selector: {{app: web-v2}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}
"
        );
        sandbox.apply(&service).unwrap();
    };
    weight("100");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    assert_eq!(versions(&sandbox, &client, 50), [0, 50]);
    let accepted = "Service shop/web-v2, parent Service web: Accepted=True";
    controller_logs(&sandbox, &[accepted]);
    let send = || {
        let [first, second] = versions(&sandbox, &client, 50);
        assert_eq!(first + second, 50, "all requests succeed");
    };
    repeat_during(send, || {
        for percent in ["50", "0", "20", "101"] {
            weight(percent);
        }
        // A change that follows at once might hide the invalid value.
        let invalid = "Accepted=False, UnsupportedValue: diy-service-mesh/canary-weight: \"101\"";
        controller_logs(&sandbox, &["Service shop/web-v2", invalid]);
        weight("0");
        let deadline = Instant::now() + READY_TIMEOUT;
        while versions(&sandbox, &client, 50) != [50, 0] {
            assert!(Instant::now() < deadline, "a share of the requests stays");
        }
    });
    weight("30");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    let [first, second] = versions(&sandbox, &client, 400);
    assert_eq!(first + second, 400, "all requests succeed");
    let bounds = binomial_bounds(400, 0.3);
    assert!(bounds.contains(&second), "{second} of 400");
}

#[test]
fn invalid_backends_fail_their_share_until_a_grant_permits_them() {
    let objects = format!("{}---{}", servers("shop"), shell(MESHED));
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    sandbox.apply(&servers("other")).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let missing = "{path: {type: Exact, value: /missing}}";
    let rules = [
        rule(missing, "{name: none, port: 80}"),
        rule(
            "{path: {type: Exact, value: /hello}}",
            "{name: web-v2, namespace: other, port: 80}",
        ),
    ];
    let route = http_route("shop", "web", "shop", &format!("[{}]", rules.join(", ")));
    sandbox.apply(&route).unwrap();
    response_until(&sandbox, &client, "/missing", "", "500 x-mesh-error");
    response_until(&sandbox, &client, "/hello", "", "500 x-mesh-error");
    controller_logs(&sandbox, &["HTTPRoute shop/web", "ResolvedRefs=False"]);
    sandbox.apply(&grant("other", "shop")).unwrap();
    response_until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    response_until(&sandbox, &client, "/missing", "", "500 x-mesh-error");
    sandbox.delete("ReferenceGrant", "other", "routes").unwrap();
    response_until(&sandbox, &client, "/hello", "", "500 x-mesh-error");
}

#[test]
fn route_in_the_clients_namespace_applies_to_its_clients_only() {
    let shells = [
        shell(MESHED),
        shell(MESHED).replace("namespace: clients", "namespace: shop"),
    ];
    let objects = format!("{}---{}", servers("shop"), shells.join("---"));
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let consumer = single_pod(&sandbox, "clients", "shell");
    let producer = single_pod(&sandbox, "shop", "shell");
    let to =
        |name: &str| format!("[{{backendRefs: [{{name: {name}, namespace: shop, port: 80}}]}}]");
    let producer_route = http_route("shop", "web", "shop", &to("web-v1"));
    sandbox.apply(&producer_route).unwrap();
    let consumer_route = http_route("clients", "web", "shop", &to("web-v2"));
    sandbox
        .apply(&format!("{consumer_route}---{}", grant("shop", "clients")))
        .unwrap();
    response_until(&sandbox, &consumer, "/hello", "", "200 Version: 2.0");
    assert_eq!(versions(&sandbox, &consumer, 20), [0, 20]);
    assert_eq!(versions(&sandbox, &producer, 20), [20, 0]);
}

#[test]
fn grpc_calls_follow_a_grpc_route() {
    let grpc = |text: String| {
        text.replace("http-server", "grpc-server")
            .replace("name: http,", "name: grpc,")
    };
    let client = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: client, namespace: clients}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}, annotations: {diy-service-mesh/inject: 'true'}}
    spec:
      containers:
        - name: grpc-client
          image: diy-sm-grpc-client:dev
          env: [{name: ENDPOINT, value: 'http://web.shop:80'}]
";
    let Some(sandbox) = with_mesh(&format!("{}---{client}", grpc(servers("shop")))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "client");
    let responds = |version: &str| {
        let text = format!("Version: {version}");
        wait_for_line(&sandbox, &client, "grpc-client", &text, |line| {
            line.contains(&text)
        });
    };
    responds("1.0");
    let route = "
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: web, namespace: shop}
spec:
  parentRefs: [{group: '', kind: Service, name: web}]
  rules:
    - matches: [{method: {service: echo.v1.EchoService}}]
      backendRefs: [{name: web-v2, port: 80}]
";
    sandbox.apply(route).unwrap();
    responds("2.0");
    // A service that the application does not call: UNIMPLEMENTED.
    sandbox
        .apply(&route.replace("EchoService", "None"))
        .unwrap();
    wait_for_line(&sandbox, &client, "grpc-client", "UNIMPLEMENTED", |line| {
        let line = line.to_lowercase();
        line.contains("unimplemented") || line.contains("not implemented")
    });
}

/// A rule with one filter, in YAML.
fn filtered(kind: &str, field: &str, value: &str) -> String {
    let backends = match kind {
        "RequestRedirect" => "backendRefs: []",
        _ => BACKENDS,
    };
    format!("{{filters: [{{type: {kind}, {field}: {value}}}], {backends}}}")
}

const BACKENDS: &str = "backendRefs: [{name: web-v2, port: 80}]";

/// Rules that a tenant may write to break the proxies of the Service's clients: valid ones, ones
/// that only the controller might accept, and nonsense.
fn hostile_rules() -> Vec<String> {
    let set = |name: &str, value: &str| {
        let header = format!("{{set: [{{name: {name}, value: {value}}}]}}");
        filtered("RequestHeaderModifier", "requestHeaderModifier", &header)
    };
    let rewrite = |value: &str| filtered("URLRewrite", "urlRewrite", value);
    let redirect = |value: &str| filtered("RequestRedirect", "requestRedirect", value);
    let cors = |value: &str| filtered("CORS", "cors", value);
    let mirror = |value: &str| {
        let value = format!("{{backendRef: {{name: web-v2, port: 80}}, {value}}}");
        filtered("RequestMirror", "requestMirror", &value)
    };
    let path = |kind: &str, value: &str| {
        format!("{{matches: [{{path: {{type: {kind}, value: {value}}}}}], {BACKENDS}}}")
    };
    let header = |value: &str| format!("{{matches: [{{headers: [{value}]}}], {BACKENDS}}}");
    let with = |field: &str| format!("{{{field}, {BACKENDS}}}");
    let long = "a".repeat(254);
    let names = [
        "x_called.by",
        "X-Mesh-Previous-Attempts",
        "x-mesh_error",
        "Proxy-Authorization",
        "grpc-timeout",
        "':path'",
        "'a b'",
        "''",
    ];
    let values = [
        "\"a\\r\\nX-Called-By: b\"",
        "\"\\0\"",
        "é",
        "' a '",
        "''",
        "\"a\\tb\"",
    ];
    let expressions = [
        "'(a*)*b'",
        "'('",
        "'(((a{100}){100}){100}){100}'",
        "'\\p{Greek}'",
        "'(?i)x'",
        "'(?-u)\\xff'",
        "'a**'",
        "''",
        "é",
    ];
    let paths = [
        "'/a b'", "/a%zz", "//", "/a/../b", "/é", "'/a?b'", "'/a#b'", "a", "''",
    ];
    let hosts = [
        "a..b", "-a", "a_b", "'*.a'", "'a:80'", "'[::1]'", "a.", "A.b",
    ];
    let origins = [
        "'*.a'",
        "'null'",
        "'http://a:99999'",
        "'https://*'",
        "'https://*.a'",
        "'http://a/b'",
        "'http://é'",
        "'ftp://a'",
    ];
    let mut rules: Vec<String> = names.map(|name| set(name, "a")).into();
    rules.extend(values.map(|value| set("x-own", value)));
    rules.extend(expressions.map(|text| path("RegularExpression", text)));
    let regex = |text| {
        header(&format!(
            "{{name: a, type: RegularExpression, value: {text}}}"
        ))
    };
    rules.extend(expressions.map(regex));
    rules.extend(paths.map(|text| path("Exact", text)));
    rules.extend(paths.map(|text| path("PathPrefix", text)));
    rules.extend(names.map(|name| header(&format!("{{name: {name}, value: a}}"))));
    for host in hosts.into_iter().chain([&*long]) {
        rules.push(rewrite(&format!("{{hostname: {host}}}")));
        rules.push(redirect(&format!("{{hostname: {host}}}")));
    }
    for text in paths {
        let full = format!("{{path: {{type: ReplaceFullPath, replaceFullPath: {text}}}}}");
        let prefix = format!("{{path: {{type: ReplacePrefixMatch, replacePrefixMatch: {text}}}}}");
        rules.extend([
            rewrite(&full),
            redirect(&full),
            rewrite(&prefix),
            redirect(&prefix),
        ]);
    }
    rules.extend(
        ["port: 0", "port: 65536", "scheme: ftp", "statusCode: 300"]
            .map(|field| redirect(&format!("{{{field}}}"))),
    );
    rules.extend(origins.map(|origin| cors(&format!("{{allowOrigins: [{origin}]}}"))));
    rules.extend(
        [
            "{allowOrigins: ['*'], allowCredentials: true, allowMethods: ['*']}",
            "{allowOrigins: ['*'], allowMethods: ['G ET']}",
            "{allowOrigins: ['*'], allowHeaders: ['a b']}",
            "{allowOrigins: ['*'], exposeHeaders: [é]}",
            "{allowOrigins: ['*'], maxAge: -1}",
            "{}",
        ]
        .map(cors),
    );
    rules.extend(
        [
            "percent: 101",
            "percent: 0",
            "fraction: {numerator: 1, denominator: 0}",
            "fraction: {numerator: 2000000000, denominator: 2000000000}",
        ]
        .map(mirror),
    );
    rules.extend(
        [
            "timeouts: {request: 99999h99999h}",
            "timeouts: {request: 99999h}",
            "timeouts: {request: 0s, backendRequest: 1s}",
            "timeouts: {request: 1s, backendRequest: 2s}",
            "retry: {codes: [399]}",
            "retry: {codes: [500], attempts: 10, backoff: 99999h}",
            "retry: {attempts: 0}",
            "retry: {codes: [500, 500, 503]}",
            "matches: [{method: get}]",
            "matches: [{method: 'A B'}]",
            "matches: [{queryParams: [{name: 'a b', value: 'c&d'}]}]",
            "name: 'é'",
        ]
        .map(with),
    );
    rules
}

/// The same for matches of gRPC.
fn hostile_calls() -> Vec<String> {
    let long = "a".repeat(1024);
    let calls = [
        format!("{{method: {long}}}"),
        format!("{{service: {long}}}"),
        format!("{{service: {long}, method: {long}}}"),
        format!("{{type: RegularExpression, method: {long}}}"),
        format!("{{type: RegularExpression, service: {long}, method: {long}}}"),
        "{type: RegularExpression, service: 'a)|(b'}".to_owned(),
        "{type: RegularExpression, method: '(?i)a|b'}".to_owned(),
        "{type: RegularExpression, method: '(a{99}){99}'}".to_owned(),
        "{service: 'a..b'}".to_owned(),
        "{method: 'a/b'}".to_owned(),
        "{service: é}".to_owned(),
    ];
    let rule = |call: String| format!("{{matches: [{{method: {call}}}], {BACKENDS}}}");
    calls.into_iter().map(rule).collect()
}

/// The rules, each in a route of its own, so that an invalid one does not hide the others.
fn one_route_each(rules: &[String]) -> String {
    let routes = rules.iter().zip(0..).map(|(rule, number)| {
        let name = format!("hostile-{number}");
        http_route("shop", &name, "shop", &format!("[{rule}]"))
    });
    Vec::from_iter(routes).join("---")
}

#[test]
fn proxies_accept_all_routes_that_the_controller_accepts() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    sandbox.apply(&one_route_each(&hostile_rules())).unwrap();
    // Rejected as a whole, the routes would not bring the response header of this one.
    let marker = |matches: &str, value: &str| {
        let header = format!("{{set: [{{name: x-marker, value: {value}}}]}}");
        let filter = format!("type: ResponseHeaderModifier, responseHeaderModifier: {header}");
        let rule = format!("{{matches: [{matches}], filters: [{{{filter}}}], {BACKENDS}}}");
        http_route("shop", "web", "shop", &format!("[{rule}]"))
    };
    let http = marker("{path: {type: Exact, value: /m.S/M}}", "http");
    sandbox.apply(&http).unwrap();
    response_until(&sandbox, &client, "/m.S/M", "", "404 x-marker: http");
    // GRPCRoutes exclude the HTTPRoutes.
    let grpc = |routes: &str| routes.replace("HTTPRoute", "GRPCRoute");
    let calls = grpc(&one_route_each(&hostile_calls()));
    sandbox.apply(&calls).unwrap();
    let call = marker("{method: {service: m.S, method: M}}", "grpc");
    sandbox.apply(&grpc(&call)).unwrap();
    response_until(&sandbox, &client, "/m.S/M", "", "404 x-marker: grpc");
    // No gRPC call, and no match: the routes without a readable rule fail it.
    let unmatched = "500 x-mesh-error: invalid-backend";
    response_until(&sandbox, &client, "/none", "", unmatched);
}
