//! Routes in a sandbox: weights, matches, errors, grants, and routes of the client's namespace.
#![allow(clippy::unwrap_used)]

use diy_mesh::sandbox::Sandbox;
use diy_mesh::sandbox::protocol::PodView;
use diy_mesh_tests::routes::{binomial_bounds, canary, grant, http_route, rule, servers};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, request_until, shell, single_pod, wait_for_line, with_mesh,
};

/// Sends a GET request to Service shop/web until the response begins with this status and contains
/// this text, and returns it: routes reach proxies with a delay.
fn until(sandbox: &Sandbox, pod: &PodView, target: &str, fields: &str, expected: &str) -> String {
    let (status, text) = expected.split_once(' ').unwrap_or((expected, ""));
    let is_expected = |response: &str| {
        response.starts_with(&format!("HTTP/1.1 {status} ")) && response.contains(text)
    };
    let request = format!("GET {target}");
    let service = ("web.shop", 80);
    request_until(sandbox, pod, &request, service, fields, is_expected).stdout
}

/// Sends requests on one connection, and returns the number of responses of each version.
fn versions(sandbox: &Sandbox, pod: &PodView, requests: usize) -> [usize; 2] {
    let script = format!(
        "exec 3<>/dev/tcp/web.shop/80
         for ((i = 1; i < {requests}; i++)); do
             printf 'GET /hello HTTP/1.1\\r\\nHost: web.shop\\r\\n\\r\\n' >&3
         done
         printf 'GET /hello HTTP/1.1\\r\\nHost: web.shop\\r\\nConnection: close\\r\\n\\r\\n' >&3
         cat <&3"
    );
    let command = ["timeout", "50", "bash", "-c", &script];
    let output = sandbox.exec(pod, "shell", &command).unwrap();
    ["Version: 1.0", "Version: 2.0"].map(|version| output.stdout.matches(version).count())
}

/// Waits for a line of any controller.
fn controller_logs(sandbox: &Sandbox, parts: &[&str]) {
    let pods = sandbox.view().pods_of("service-mesh", "controller");
    let find = |view: &diy_mesh::sandbox::View| {
        let mut lines = pods.iter().flat_map(|pod| view.lines(pod, "controller"));
        let is_it = |line: &&String| parts.iter().all(|part| line.contains(part));
        lines.find(is_it).cloned()
    };
    let what = format!("a controller logs {parts:?}");
    sandbox.wait(&what, READY_TIMEOUT, find).unwrap();
}

#[test]
fn requests_follow_weights_and_matches() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    let v2 = "{name: web-v2, port: 80}";
    let rules = [
        rule("{headers: [{name: X-Canary, value: 'yes'}]}", v2),
        rule("{queryParams: [{name: version, value: '2'}]}", v2),
        rule("{path: {type: PathPrefix, value: /other}}", v2),
        canary(10),
    ];
    let route = http_route("shop", "web", "shop", &format!("[{}]", rules.join(", ")));
    sandbox.apply(&route).unwrap();
    // No rule matches: the proxy responds, not the application.
    until(&sandbox, &client, "/none", "", "404 x-mesh-error");
    for _ in 0..20 {
        let field = "x-canary: yes\\r\\n";
        until(&sandbox, &client, "/hello", field, "200 Version: 2.0");
    }
    until(
        &sandbox,
        &client,
        "/hello?version=2",
        "",
        "200 Version: 2.0",
    );
    // The application responds.
    until(
        &sandbox,
        &client,
        "/other/path",
        "",
        "404 this server answers /hello",
    );
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
    until(&sandbox, &client, "/other/path", "", "404 x-mesh-error");
    assert_eq!(versions(&sandbox, &client, 50), [0, 50]);
    // Without the route, the Service has its own pods again.
    sandbox.delete("HTTPRoute", "shop", "web").unwrap();
    until(
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
    until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
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
    until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    assert_eq!(versions(&sandbox, &client, 50), [0, 50]);
    let accepted = "Service shop/web-v2, parent Service web: Accepted=True";
    controller_logs(&sandbox, &[accepted]);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| versions(&sandbox, &client, 3000));
        for percent in ["50", "0", "20", "101", "0"] {
            weight(percent);
        }
        let [first, second] = load.join().unwrap();
        assert_eq!(first + second, 3000, "all requests succeed");
    });
    until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    assert_eq!(versions(&sandbox, &client, 50), [50, 0]);
    weight("30");
    until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    let [first, second] = versions(&sandbox, &client, 400);
    assert_eq!(first + second, 400, "all requests succeed");
    let bounds = binomial_bounds(400, 0.3);
    assert!(bounds.contains(&second), "{second} of 400");
    let invalid = "Accepted=False, UnsupportedValue: diy-service-mesh/canary-weight: \"101\"";
    controller_logs(&sandbox, &["Service shop/web-v2", invalid]);
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
    until(&sandbox, &client, "/missing", "", "500 x-mesh-error");
    until(&sandbox, &client, "/hello", "", "500 x-mesh-error");
    controller_logs(&sandbox, &["HTTPRoute shop/web", "ResolvedRefs=False"]);
    sandbox.apply(&grant("other", "shop")).unwrap();
    until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    until(&sandbox, &client, "/missing", "", "500 x-mesh-error");
    sandbox.delete("ReferenceGrant", "other", "routes").unwrap();
    until(&sandbox, &client, "/hello", "", "500 x-mesh-error");
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
    until(&sandbox, &consumer, "/hello", "", "200 Version: 2.0");
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
