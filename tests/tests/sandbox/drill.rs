//! A drill: faults in one sandbox, one after the other. A command names the cause of each, and the
//! object to blame.

use std::time::Instant;

use diy_mesh_sandbox::{Sandbox, protocol::PodView};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, run, shell, single_pod, wait_for_line, with_controller,
};

use crate::demo_socket::{Session, text};

/// The requests that are sent at a time.
const REQUESTS: &str = "1 2 3 4";

/// A fault that the objects, or a test, make.
pub(super) struct Case {
    /// As in docs/troubleshooting.md.
    fault: &'static str,
    /// Host and path of the requests.
    url: &'static str,
    /// The command. `ID` is the exchange that the response names.
    command: &'static str,
    /// Parts of lines of its output, with `*` for anything.
    names: &'static [&'static str],
}

const CASES: [Case; 19] = [
    Case {
        fault: "an AuthorizationPolicy denies the call",
        url: "denied.shop/denied",
        command: "mesh why clients/shell shop/denied",
        names: &[
            "Why: the proxy of the callee answered denied: denied by AuthorizationPolicy shop/nobody",
            "Proxy of the callee, shop/web-",
        ],
    },
    Case {
        fault: "a Service has no ready endpoint",
        url: "empty.shop/",
        command: "mesh why clients/shell shop/empty",
        names: &[
            "Why: the proxy of the caller answered no-endpoint: service shop/empty has no ready endpoint",
        ],
    },
    Case {
        fault: "the `targetPort` of a Service is wrong",
        url: "wrong-port.shop/",
        command: "mesh why clients/shell shop/wrong-port",
        names: &[
            "Why: the proxy of the callee answered connect-failed: *:8081: Connection refused",
            "destination  shop/wrong-port",
            "Proxy of the callee, shop/web-",
        ],
    },
    Case {
        fault: "an application is slower than the timeout of its route",
        url: "slow.shop/hello",
        command: "mesh why clients/shell shop/slow",
        names: &[
            "Why: the proxy of the caller answered timeout: *request timeout of the route",
            "route        HTTPRoute shop/slow*, to shop/slow:80",
            "attempt      1. *:8080 of shop/slow-",
        ],
    },
    Case {
        fault: "an application resets the connection",
        url: "resets.shop/",
        command: "mesh why clients/shell shop/resets",
        names: &[
            "Why: the proxy of the callee answered upstream-closed: *:8080 closed the connection",
            "Proxy of the callee, shop/resets-",
        ],
    },
    Case {
        fault: "an application does not speak HTTP",
        url: "no-http.shop/",
        command: "mesh why clients/shell shop/no-http",
        names: &[
            "Why: the proxy of the callee answered upstream-malformed: *:8080 sent a malformed HTTP response",
            "Proxy of the callee, shop/no-http-",
        ],
    },
    Case {
        fault: "the name of a host outside of the cluster has no address",
        url: "outside.shop/",
        command: "mesh why clients/shell shop/outside",
        names: &[
            "Why: the proxy of the caller answered unresolved: cannot resolve api.mesh.invalid: ",
            "route        HTTPRoute shop/outside*, to ",
        ],
    },
    Case {
        fault: "a circuit breaker is open",
        url: "breaker.shop/hello",
        command: "mesh why clients/shell shop/breaker",
        names: &[
            "Why: the proxy of the caller answered circuit-open: *of shop/breaker*by TrafficPolicy shop/breaker",
        ],
    },
    Case {
        fault: "retries hide a failure",
        url: "retried.shop/hello",
        command: "mesh why clients/shell shop/retried",
        names: &[
            "Why: it did not fail: 200, by a retry after attempt 1. *of shop/failing-*; failed: retried-status: *responded with 500",
        ],
    },
    Case {
        fault: "one of three replicas fails",
        url: "three.shop/hello",
        command: "mesh proxy clients/shell --destination shop/three",
        names: &["shop/failing-*ejected ("],
    },
    Case {
        fault: "one of two replicas is slow",
        url: "uneven.shop/hello",
        command: "mesh proxy clients/shell --destination shop/uneven",
        names: &["shop/slow-* 20*.* ms "],
    },
    Case {
        fault: "the endpoints of one zone are slow",
        url: "zones.shop/hello",
        command: "mesh proxy clients/shell --destination shop/zones",
        names: &["shop/far-* b * 20*.* ms "],
    },
    Case {
        fault: "the requests exceed a rate limit",
        url: "limited.shop/hello",
        command: "mesh why clients/shell shop/limited",
        names: &[
            "Why: the proxy of the callee answered rate-limited: rate limit TrafficPolicy shop/limited/each",
            "Proxy of the callee, shop/limited-",
        ],
    },
    Case {
        fault: "an endpoint has as many requests as a TrafficPolicy allows",
        url: "busy.shop/hello",
        command: "mesh why clients/shell shop/busy",
        names: &[
            "Why: the proxy of the caller answered upstream-overloaded: *has reached maxRequests of TrafficPolicy shop/busy",
        ],
    },
    Case {
        fault: "a TrafficPolicy injects a fault",
        url: "faulty.shop/hello",
        command: "mesh why clients/shell shop/faulty",
        names: &[
            "Why: the proxy of the caller answered fault-injected: fault of TrafficPolicy shop/faulty",
        ],
    },
    Case {
        fault: "a canary without endpoints keeps its weight",
        url: "canary.shop/hello",
        command: "mesh why clients/shell shop/canary",
        names: &[
            "Why: the proxy of the caller answered no-endpoint: service shop/empty has no ready endpoint",
            "route        HTTPRoute shop/canary*, to shop/empty:80",
        ],
    },
    Case {
        fault: "a route names a Service that does not exist",
        url: "rejected.shop/hello",
        command: "mesh why clients/shell shop/rejected",
        names: &[
            "Why: the proxy of the caller answered invalid-backend: HTTPRoute shop/rejected*has no valid backend",
        ],
    },
    Case {
        fault: "a probe fails",
        url: "unready.shop/hello",
        command: "mesh proxy shop/unready",
        names: &["probes *failed, HTTP GET /hello on port 8080: status-500"],
    },
    Case {
        fault: "a pod without a proxy calls a strict one",
        url: "strict.shop/hello",
        command: "mesh why ID",
        names: &[
            "Why: the proxy of the callee answered mtls-required: ",
            "Proxy of the callee, shop/strict-",
            "The client is pod outside/shell-*, which has no proxy of the mesh.",
        ],
    },
];

const CONTROLLER_GONE: Case = Case {
    fault: "no controller is available",
    url: "three.shop/hello",
    command: "mesh proxy clients/shell",
    names: &["Discovery * not connected, latest message * ago"],
};

const EXPIRED: Case = Case {
    fault: "the certificate of a caller has expired",
    url: "faultless.shop/hello",
    command: "mesh why clients/shell shop/faultless",
    names: &[
        "Why: the proxy of the caller answered no-certificate: *requires mutual TLS, and this proxy has no valid certificate",
        "of shop/web-",
    ],
};

/// The case of the test of clocks.
pub(super) const SKEWED: Case = Case {
    fault: "the clock of a node is wrong",
    url: "http-server.servers/hello",
    command: "mesh proxy clients/shell",
    names: &[
        "Certificate*none that is valid",
        "failed*invalid peer certificate: certificate expired*; check the clocks of this node and of the controller's",
    ],
};

/// A Deployment in namespace `shop`, with fields of its only container.
fn deployment(name: &str, labels: &str, annotations: &str, container: &str) -> String {
    format!(
        "---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: shop}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata:
      labels: {{app: {name}, {labels}}}
      annotations: {{{MESHED}, {annotations}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{{name: app, image: 'diy-sm-http-server:dev', {container}}}]
"
    )
}

/// A Service in namespace `shop`.
fn service(name: &str, selector: &str, target_port: u16) -> String {
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec: {{selector: {{{selector}}}, ports: [{{port: 80, targetPort: {target_port}}}]}}
"
    )
}

/// A TrafficPolicy of the Service of this name.
fn policy(name: &str, section: &str) -> String {
    let target = format!("targetRefs: [{{group: '', kind: Service, name: {name}}}]");
    object(
        "diy-service-mesh.dev/v1alpha1",
        "TrafficPolicy",
        name,
        &format!("{target}, {section}"),
    )
}

/// An HTTPRoute of the Service of this name, with one rule.
fn route(name: &str, rule: &str) -> String {
    let parent = format!("parentRefs: [{{group: '', kind: Service, name: {name}}}]");
    let spec = format!("{parent}, rules: [{{{rule}}}]");
    object("gateway.networking.k8s.io/v1", "HTTPRoute", name, &spec)
}

fn object(version: &str, kind: &str, name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{{spec}}}\n"
    )
}

const STARTUP: &str =
    "startupProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, failureThreshold: 60}";

/// A Deployment whose pods are on the Node of a zone.
fn in_zone(zone: &str, deployment: &str) -> String {
    let pod = "    spec:\n";
    let on_node = format!("{pod}      nodeName: {zone}\n");
    assert!(deployment.contains(pod));
    format!(
        "---
apiVersion: v1
kind: Node
metadata: {{name: {zone}, labels: {{topology.kubernetes.io/zone: {zone}}}}}
{}",
        deployment.replace(pod, &on_node)
    )
}

/// The pods and their Services.
fn workloads() -> String {
    let program = |more: &str| format!("{more}, {STARTUP}");
    let env =
        |name: &str, value: u32| program(&format!("env: [{{name: {name}, value: '{value}'}}]"));
    let tcp = |arguments: &str| program(&format!("command: [sandbox-tcp-server, {arguments}]"));
    let strict = "diy-service-mesh/inbound: strict";
    let pods = [
        deployment("web", "group: three, pace: uneven", "", STARTUP),
        deployment("web-2", "group: three", "", STARTUP),
        deployment("failing", "group: three", "", &env("FAIL_RATE", 100)),
        deployment("slow", "pace: uneven", "", &env("DELAY_MS", 2000)),
        in_zone("a", &deployment("near", "spread: zones", "", STARTUP)),
        in_zone(
            "b",
            &deployment("far", "spread: zones", "", &env("DELAY_MS", 2000)),
        ),
        deployment("limited", "", "", STARTUP),
        deployment("resets", "", "", &tcp("'8080'")),
        deployment("no-http", "", "", &tcp("'8080', hello")),
        deployment("strict", "", strict, STARTUP),
    ];
    let own = ["slow", "limited", "resets", "no-http", "strict", "unready"];
    let own = own.map(|name| service(name, &format!("app: {name}"), 8080));
    let of_web = [
        "denied",
        "outside",
        "faulty",
        "faultless",
        "canary",
        "rejected",
    ];
    let of_web = of_web.map(|name| service(name, "app: web", 8080));
    let others = [
        service("empty", "app: none", 8080),
        service("wrong-port", "app: web", 8081),
        service("breaker", "app: failing", 8080),
        service("retried", "group: three", 8080),
        service("three", "group: three", 8080),
        service("uneven", "pace: uneven", 8080),
        service("zones", "spread: zones", 8080),
        service("busy", "app: slow", 8080),
    ];
    [&pods[..], &own, &of_web, &others].concat().concat()
}

/// The routes and policies.
fn faults() -> String {
    let denial = "targetRefs: [{group: '', kind: Pod, selector: {matchLabels: {app: web}}}],
        action: DENY, rules: [{networkAttributes: {ports: [8080]}, requests: [{paths: [{type: Exact, value: /denied}]}]}]";
    let host = "type: ExternalHostname, port: {port: 443}, externalHostname: {hostname: api.mesh.invalid},
        tls: {mode: ServerOnly, validation: {hostname: api.mesh.invalid, wellKnownCACertificates: System}}";
    let outside = "backendRefs: [{group: gateway.networking.x-k8s.io, kind: XBackend, name: api}]";
    let canary = "backendRefs: [{name: canary, port: 80}, {name: empty, port: 80, weight: 2}]";
    let slow = "timeouts: {request: 300ms}, backendRefs: [{name: slow, port: 80}]";
    [
        object(
            "diy-service-mesh.dev/v1alpha1",
            "AuthorizationPolicy",
            "nobody",
            denial,
        ),
        object(
            "gateway.networking.x-k8s.io/v1alpha1",
            "XBackend",
            "api",
            host,
        ),
        route("outside", outside),
        route("canary", canary),
        route("rejected", "backendRefs: [{name: missing, port: 80}]"),
        route("slow", slow),
        policy(
            "breaker",
            "circuitBreaker: {failurePercent: 50, minRequests: 4, openTime: 10s}",
        ),
        policy(
            "retried",
            "retry: {codes: [500], attempts: 2, backoff: 1ms}",
        ),
        policy("three", "loadBalancing: {algorithm: RoundRobin}"),
        policy("uneven", "loadBalancing: {algorithm: RoundRobin}"),
        policy("zones", "loadBalancing: {algorithm: RoundRobin}"),
        policy(
            "limited",
            "rateLimits: [{name: each, requests: 1, window: 10h, per: Caller}]",
        ),
        policy("busy", "connections: {maxRequests: 1, maxWaiting: 1}"),
        policy("faulty", "faults: [{abort: {status: 503}}]"),
    ]
    .concat()
}

/// Sends requests side by side, and returns the responses.
fn send(sandbox: &Sandbox, client: &PodView, url: &str) -> String {
    let (host, path) = url.split_once('/').unwrap();
    let request =
        format!("GET /{path} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n");
    let script = format!(
        "for i in {REQUESTS}; do
             exec {{fd}}<>/dev/tcp/{host}/80 && printf '{request}' >&$fd && all+=\" $fd\"
         done
         for fd in $all; do cat <&$fd; done"
    );
    run(sandbox, client, &script)
}

/// Whether a line of the page contains the parts of a pattern in order.
fn names(page: &str, pattern: &str) -> bool {
    page.lines().any(|line| {
        let mut parts = pattern.split('*');
        let rest = parts.try_fold(line, |rest, part| Some(rest.split_once(part)?.1));
        rest.is_some()
    })
}

impl Case {
    /// Sends requests until the command names the cause.
    pub(super) fn drill(&self, sandbox: &Sandbox, session: &Session, client: &PodView) {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let responses = send(sandbox, client, self.url);
            let page = self.ask(session, &responses);
            let missing = self.names.iter().find(|part| !names(&page, part));
            let Some(missing) = missing else { break };
            let (fault, command) = (self.fault, self.command);
            assert!(
                Instant::now() < deadline,
                "{fault}: no {missing:?} in {command}:\n{page}\n{responses}"
            );
        }
    }

    fn ask(&self, session: &Session, responses: &str) -> String {
        let id = responses.split_once("x-mesh-exchange: ");
        let id = id.and_then(|(_, rest)| rest.split_whitespace().next());
        let words = self.command.split(' ').skip(1);
        let words = words.map(|word| {
            if word == "ID" {
                id.unwrap_or(word)
            } else {
                word
            }
        });
        let mut arguments: Vec<&str> = words.collect();
        arguments.insert(1, "--demo");
        text(&session.run(&arguments))
    }
}

#[test]
fn each_fault_is_named_by_a_command() {
    let clients = [
        shell(MESHED),
        shell("").replace("namespace: clients", "namespace: outside"),
    ];
    let objects = [workloads(), faults(), format!("---{}", clients.join("---"))];
    let life = ("CERTIFICATE_LIFE", "30");
    let Some(sandbox) = with_controller(&[life], &objects.concat()) else {
        return;
    };
    let probe = "env: [{name: FAIL_RATE, value: '100'}],
        readinessProbe: {httpGet: {port: 8080, path: /hello}, periodSeconds: 1}";
    let unready = deployment("unready", "", "", probe);
    sandbox.apply(&unready).unwrap();
    let session = Session::new("drill");
    let _server = sandbox.serve(&session.socket()).unwrap();
    let [client, outside] = ["clients", "outside"].map(|name| single_pod(&sandbox, name, "shell"));
    for case in &CASES {
        let is_strict = case.url.starts_with("strict.");
        case.drill(
            &sandbox,
            &session,
            if is_strict { &outside } else { &client },
        );
    }
    get(&sandbox, &client, "faultless.shop", 80);
    sandbox.scale("service-mesh", "controller", 0).unwrap();
    CONTROLLER_GONE.drill(&sandbox, &session, &client);
    get(&sandbox, &client, "faultless.shop", 80);
    wait_for_line(&sandbox, &client, "proxy", "the expiry", |line| {
        line.contains("certificate expired")
    });
    EXPIRED.drill(&sandbox, &session, &client);
}
