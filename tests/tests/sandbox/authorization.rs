//! AuthorizationPolicies in a sandbox: who may call what, over every way to a pod, and what a change
//! does to open connections.

use std::time::Instant;

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::servers;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, metric, request_until, run, shell, single_pod, with_mesh,
};

/// A client in a namespace.
fn client(namespace: &str, annotations: &str) -> String {
    shell(annotations).replace("namespace: clients", &format!("namespace: {namespace}"))
}

/// Service `db` of a server that speaks first, and stays until the client leaves.
fn database() -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: db, namespace: shop}}
spec: {{selector: {{app: db}}, ports: [{{name: db, port: 9000, targetPort: 9000}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: db, namespace: shop}}
spec:
  selector: {{matchLabels: {{app: db}}}}
  template:
    metadata: {{labels: {{app: db}}, annotations: {{{MESHED}}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: db
          image: diy-sm-http-server:dev
          command: [sandbox-tcp-server, '9000', db]
          startupProbe: {{tcpSocket: {{port: 9000}}, periodSeconds: 1, failureThreshold: 60}}
"
    )
}

/// The servers, and clients that are meshed in two namespaces and unmeshed in a third one.
fn mesh() -> Option<(Sandbox, [PodView; 3])> {
    let clients = [
        client("clients", MESHED),
        client("shop", MESHED),
        client("outside", ""),
    ];
    let objects = [&servers("shop"), "---", &clients.join("---")];
    let sandbox = with_mesh(&objects.concat())?;
    let pods = ["clients", "shop", "outside"].map(|name| single_pod(&sandbox, name, "shell"));
    Some((sandbox, pods))
}

/// An AuthorizationPolicy with this specification, a YAML mapping without braces.
fn policy(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: {name}, namespace: {namespace}}}
spec: {{{spec}}}
"
    )
}

const WEB: &str = "targetRefs: [{group: '', kind: Service, name: web}]";
/// The metric of open connections.
const OPEN: &str = "connections_open{direction=\"inbound\"}";
const ALL_PODS: &str = "targetRefs: [{group: '', kind: Pod, selector: {}}]";

/// The status of the response to a request.
fn status(sandbox: &Sandbox, pod: &PodView, what: &str, (host, port): (&str, u16)) -> String {
    let is_any = |response: &str| response.starts_with("HTTP/1.1 ");
    let response = request_until(sandbox, pod, what, (host, port), "", is_any).stdout;
    response.split(' ').nth(1).unwrap().to_owned()
}

/// Sends a request until the response has this status: policies reach proxies with a delay.
fn until(sandbox: &Sandbox, pod: &PodView, what: &str, status: &str) -> String {
    let start = format!("HTTP/1.1 {status} ");
    let is_expected = |response: &str| response.starts_with(&start);
    request_until(sandbox, pod, what, ("web.shop", 80), "", is_expected).stdout
}

#[test]
fn allow_policy_decides_by_caller_and_request_over_every_way_to_a_pod() {
    let Some((sandbox, [clients, shop, outside])) = mesh() else {
        return;
    };
    for pod in [&clients, &shop, &outside] {
        until(&sandbox, pod, "GET /hello", "200");
    }
    let rules = "action: ALLOW, rules: [{
        sources: [{type: ServiceAccount, serviceAccount: {namespace: clients, name: default}}],
        requests: [{methods: [GET], paths: [{type: Exact, value: /hello}]}]}]";
    let allow = policy("shop", "web", &format!("{WEB}, {rules}"));
    sandbox.apply(&allow).unwrap();
    let denied = until(&sandbox, &shop, "GET /hello", "403");
    assert!(denied.contains("x-mesh-error: denied"), "{denied}");
    // A caller of the namespace of the policy is told which one it is.
    assert!(denied.contains("AuthorizationPolicy shop/web"), "{denied}");
    let denied = until(&sandbox, &outside, "GET /hello", "403");
    assert!(!denied.contains("shop/web"), "{denied}");
    until(&sandbox, &clients, "GET /hello", "200");
    for other in [
        "POST /hello",
        "GET /other",
        "GET /hello/",
        "GET //hello",
        "GET /HELLO",
    ] {
        assert_eq!(
            status(&sandbox, &clients, other, ("web.shop", 80)),
            "403",
            "{other}"
        );
    }
    // The pods are the same, whichever name leads to them.
    let address = single_pod(&sandbox, "shop", "web-v1").ip.unwrap();
    for (host, port) in [("web-v1.shop", 80), (&*address, 8080)] {
        let status = |pod| status(&sandbox, pod, "GET /hello", (host, port));
        assert_eq!(status(&clients), "200", "{host}");
        assert_eq!(status(&shop), "403", "{host}");
        assert_eq!(status(&outside), "403", "{host}");
    }
    // Other pods of the namespace are not concerned.
    assert_eq!(
        status(&sandbox, &shop, "GET /hello", ("web-v2.shop", 80)),
        "200"
    );
    sandbox
        .delete("AuthorizationPolicy", "shop", "web")
        .unwrap();
    until(&sandbox, &shop, "GET /hello", "200");
    until(&sandbox, &outside, "GET /hello", "200");
}

#[test]
fn deny_policy_wins_over_allow_and_no_spelling_of_a_path_passes() {
    let Some((sandbox, [clients, shop, outside])) = mesh() else {
        return;
    };
    let allow = "action: ALLOW, rules: [{sources: [{type: Namespace, namespace: clients}, {type: Unauthenticated}]}]";
    let deny = "action: DENY, rules: [{networkAttributes: {ports: [8080]}, requests: [{
        paths: [{type: PathPrefix, value: /admin}]}]}]";
    let both = [
        policy("shop", "allow", &format!("{WEB}, {allow}")),
        policy("shop", "deny", &format!("{WEB}, {deny}")),
    ];
    sandbox.apply(&both.join("---")).unwrap();
    until(&sandbox, &clients, "GET /admin", "403");
    until(&sandbox, &shop, "GET /hello", "403");
    until(&sandbox, &clients, "GET /hello", "200");
    until(&sandbox, &outside, "GET /hello", "200");
    for spelling in [
        "/admin/",
        "/admin?x=/hello",
        "/ADMIN",
        "/%61dmin",
        "//admin",
        "/./admin",
        "/hello/../admin",
        "/hello/%2e%2e/admin",
        "/admin;x=y/users",
        "/hello/..;/admin",
        "/hello%2f..%2fadmin",
        "/admin%2fusers",
        "/admin%00",
        "/hello/..%5cadmin",
        "//hello/admin",
        "http://web.shop/admin",
        "http://web.shop//hello/../admin",
        "web.shop/admin",
    ] {
        let request = format!("GET {spelling}");
        for pod in [&clients, &outside] {
            let status = status(&sandbox, pod, &request, ("web.shop", 80));
            assert!(matches!(&*status, "400" | "403"), "{spelling}: {status}");
        }
    }
}

#[test]
fn default_of_a_namespace_closes_it_and_fails_no_probe() {
    let Some((sandbox, [clients, shop, outside])) = mesh() else {
        return;
    };
    let default = policy(
        "shop",
        "closed",
        &format!("{ALL_PODS}, defaultAction: DENY"),
    );
    sandbox.apply(&default).unwrap();
    for pod in [&clients, &shop, &outside] {
        until(&sandbox, pod, "GET /hello", "403");
    }
    let allow = "action: ALLOW, rules: [{sources: [{type: Namespace, namespace: shop}]}]";
    let allow = policy("shop", "web", &format!("{WEB}, {allow}"));
    sandbox.apply(&allow).unwrap();
    until(&sandbox, &shop, "GET /hello", "200");
    assert_eq!(
        status(&sandbox, &clients, "GET /hello", ("web.shop", 80)),
        "403"
    );
    // The client of the namespace may call others, and a pod that starts gets ready.
    sandbox.scale("shop", "web-v1", 2).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let pods = sandbox.view().pods_of("shop", "web-v1");
    assert!(
        pods.iter().all(|pod| pod.ready && pod.restarts() == 0),
        "{pods:?}"
    );
    let new = pods.iter().filter_map(|pod| pod.ip.as_deref());
    for address in new {
        assert_eq!(
            status(&sandbox, &clients, "GET /hello", (address, 8080)),
            "403"
        );
        assert_eq!(
            status(&sandbox, &shop, "GET /hello", (address, 8080)),
            "200"
        );
    }
}

#[test]
fn audit_refuses_nothing_and_counts() {
    let Some((sandbox, [clients, ..])) = mesh() else {
        return;
    };
    let audit =
        "action: DENY, mode: Audit, rules: [{sources: [{type: Namespace, namespace: clients}]}]";
    sandbox
        .apply(&policy("shop", "web", &format!("{WEB}, {audit}")))
        .unwrap();
    let server = single_pod(&sandbox, "shop", "web-v1");
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        assert_eq!(
            status(&sandbox, &clients, "GET /hello", ("web.shop", 80)),
            "200"
        );
        let sample = "verdicts_total{direction=\"inbound\",verdict=\"would-deny\"}";
        if metric(&sandbox, &server, sample) > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "nothing is counted");
    }
}

#[test]
fn change_ends_an_open_connection_and_no_byte_reaches_a_denied_client() {
    let clients = [client("clients", MESHED), client("outside", "")];
    let objects = [&database(), "---", &clients.join("---")];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let [clients, outside] = ["clients", "outside"].map(|name| single_pod(&sandbox, name, "shell"));
    // The lines of a connection, and the word that tells how it ended.
    let connect = |pod: &PodView, then: &str| {
        let script = format!(
            "exec 3<>/dev/tcp/db.shop/9000; read -r -t 20 line <&3 && echo \"got $line\"; {then}"
        );
        run(&sandbox, pod, &script)
    };
    let until = |pod: &PodView, is_open: bool| {
        let deadline = Instant::now() + READY_TIMEOUT;
        while connect(pod, ":").contains("got db") != is_open {
            assert!(Instant::now() < deadline, "{} {is_open}", pod.full_name());
        }
    };
    until(&clients, true);
    until(&outside, true);
    let allow = |namespace: &str| {
        let rules = format!(
            "action: ALLOW, rules: [{{sources: [{{type: Namespace, namespace: {namespace}}}]}}]"
        );
        let target = "targetRefs: [{group: '', kind: Pod, selector: {matchLabels: {app: db}}}]";
        policy("shop", "db", &format!("{target}, {rules}"))
    };
    sandbox.apply(&allow("clients")).unwrap();
    until(&outside, false);
    until(&clients, true);
    let server = single_pod(&sandbox, "shop", "db");
    let wait_for_connections = |some: bool| {
        let deadline = Instant::now() + READY_TIMEOUT;
        while (metric(&sandbox, &server, OPEN) > 0) != some {
            assert!(Instant::now() < deadline, "open connections: {some}");
        }
    };
    wait_for_connections(false);
    std::thread::scope(|scope| {
        // Waits for the end of the connection, which the server keeps open.
        let wait = "if read -r -t 40 more <&3; then echo more
             elif (( $? > 128 )); then echo open; else echo ended; fi";
        let open = scope.spawn(|| connect(&clients, wait));
        wait_for_connections(true);
        sandbox.apply(&allow("others")).unwrap();
        assert_eq!(open.join().unwrap(), "got db\nended\n");
    });
    until(&clients, false);
}
