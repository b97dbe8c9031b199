//! The program with a fake API server that records its calls: the manifests permit each of them,
//! and no others.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, Mutex};

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::mesh::v1::service_mesh_service_client::ServiceMeshServiceClient;
use diy_mesh_testkit::net::{listen, read_head};
use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::wait::eventually;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::Deserialize;
use serde_json::{Value, json};
use support::{Client, claims, web};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const MESH: &str = "service-mesh";
/// Permissions that this test does not need.
const UNUSED: [&str; 4] = [
    // Another namespace has its first policy.
    "update configmaps diy-service-mesh-authorization",
    // The callers of pods are written again some minutes later.
    "update configmaps",
    // A restore of etcd changes the epoch.
    "patch configmaps diy-service-mesh-epoch",
    // A rotation changes the CA.
    "patch secrets diy-service-mesh-ca",
];

/// The custom kinds that are installed, and their versions.
const DEFINITIONS: [(&str, &str); 12] = [
    ("httproutes.gateway.networking.k8s.io", "v1"),
    ("grpcroutes.gateway.networking.k8s.io", "v1"),
    ("tcproutes.gateway.networking.k8s.io", "v1"),
    ("referencegrants.gateway.networking.k8s.io", "v1"),
    ("trafficpolicies.diy-service-mesh.dev", "v1alpha1"),
    ("authorizationpolicies.diy-service-mesh.dev", "v1alpha1"),
    ("trafficsplits.split.smi-spec.io", "v1alpha4"),
    ("httproutegroups.specs.smi-spec.io", "v1alpha4"),
    ("tcproutes.specs.smi-spec.io", "v1alpha4"),
    ("traffictargets.access.smi-spec.io", "v1alpha3"),
    ("xbackends.gateway.networking.x-k8s.io", "v1alpha1"),
    ("xmeshes.gateway.networking.x-k8s.io", "v1alpha1"),
];

#[tokio::test]
async fn controller_makes_the_calls_that_the_manifests_permit() {
    let api = Api::start().await;
    api.0.lock().unwrap().add_outdated_edges();
    let mut controller = start(&api).await;
    let line = controller.line("listening grpc=").await;
    let address = line.split("grpc=").nth(1).unwrap();
    let address: SocketAddr = address.split(' ').next().unwrap().parse().unwrap();
    controller.line("this replica writes the status").await;
    let roots = api.until("the roots are published", roots).await;
    // Before, it would show that the mesh had a CA.
    api.0.lock().unwrap().add_report_of_crashed_replica();
    let channel = support::connect(address, &roots).await.unwrap();
    let token = Signer::named("any").sign(&claims());
    let mut client = Client {
        client: ServiceMeshServiceClient::new(channel),
        token: Some(token.clone()),
        announced: None,
    };
    // Refused, with an Event; the second time with a change of this Event.
    for _ in 0..2 {
        let request = proto::SignCertificateRequest {
            name: "system:serviceaccount:shop:web".into(),
            token: token.clone(),
            csr: b"none".to_vec(),
        };
        client.client.sign_certificate(request).await.unwrap_err();
    }
    client.identity().await.unwrap();
    let rules = rules();
    let expected: BTreeSet<String> = UNUSED.map(String::from).into();
    let unused = |objects: &Objects| {
        let rules = rules.iter().flat_map(Rule::permissions);
        let is_used = |(rule, permission): &(&Rule, String)| {
            let mut calls = objects.calls.iter();
            calls.any(|call| call.permission(rule) == *permission && rule.permits(call))
        };
        let unused = rules.filter(|one| !is_used(one));
        unused.map(|(_, name)| name).collect::<BTreeSet<_>>()
    };
    api.until("all permissions are used", |objects| {
        let unused = unused(objects);
        unused.is_subset(&expected).then_some(()).ok_or(unused)
    })
    .await;
    controller.signal(Signal::SIGTERM);
    controller.exited().await;
    let objects = api.0.lock().unwrap();
    let forbidden: Vec<&Call> = objects
        .calls
        .iter()
        .filter(|call| !rules.iter().any(|rule| rule.permits(call)))
        .collect();
    assert!(forbidden.is_empty(), "not in the manifests: {forbidden:#?}");
    let stale: Vec<_> = expected.difference(&unused(&objects)).cloned().collect();
    assert!(stale.is_empty(), "used, delete from UNUSED: {stale:?}");
    let lease = objects.get("coordination.k8s.io", "leases", "diy-service-mesh-status");
    for resource in ["httproutes", "grpcroutes", "tcproutes"] {
        let route = objects.get("gateway.networking.k8s.io", resource, "web");
        let entry = &route.unwrap()["status"]["parents"][0];
        assert_eq!(entry["controllerName"], "diy-service-mesh.dev/controller");
        // The GRPCRoute excludes the HTTPRoute, whose backends exist all the same.
        assert_eq!(entry["conditions"][1]["status"], "True", "{entry:#}");
    }
    let backend = objects.get("gateway.networking.x-k8s.io", "xbackends", "api");
    let entry = &backend.unwrap()["status"]["parents"][0];
    assert_eq!(entry["parentRef"]["name"], "web");
    assert_eq!(entry["conditions"][0]["status"], "True", "{entry:#}");
    for resource in ["trafficpolicies", "authorizationpolicies"] {
        let policy = objects.get("diy-service-mesh.dev", resource, "web");
        let entry = &policy.unwrap()["status"]["ancestors"][0];
        assert_eq!(entry["ancestorRef"]["name"], "web");
        assert_eq!(entry["conditions"][0]["status"], "True", "{entry:#}");
    }
    assert_eq!(lease.unwrap()["spec"]["holderIdentity"], "", "released");
}

fn roots(objects: &Objects) -> Result<String, String> {
    let map = objects.get("", "configmaps", "diy-service-mesh-roots");
    let roots = map.and_then(|map| map["data"]["roots.pem"].as_str());
    roots.map(str::to_owned).ok_or("no ConfigMap".to_owned())
}

async fn start(api: &Api) -> Process {
    let files = support::scratch();
    let path = files.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", api.1)}}],
        "users": [{"name": "test", "user": {"token": "controller"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    std::fs::write(&path, config.to_string()).unwrap();
    let controller = Process::start(
        Command::new(env!("CARGO_BIN_EXE_controller"))
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(["--pod-namespace", MESH])
            .env("KUBECONFIG", &path)
            .env("NO_COLOR", "1"),
    );
    // The program reads the file before it connects.
    api.until("a call", |objects| {
        objects.calls.first().map(drop).ok_or("no call")
    })
    .await;
    controller
}

/// A call, in the terms of RBAC.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    verb: &'static str,
    group: String,
    namespace: Option<String>,
    /// With the subresource.
    resource: String,
    name: Option<String>,
}

impl Call {
    /// The permission, with the name of the object if the rule has names.
    fn permission(&self, rule: &Rule) -> String {
        let name = self.name.as_deref().filter(|_| !rule.names().is_empty());
        permission(self.verb, &self.resource, &self.group, name)
    }
}

fn permission(verb: &str, resource: &str, group: &str, name: Option<&str>) -> String {
    let separator = if group.is_empty() { "" } else { "." };
    let name = name.map(|name| format!(" {name}")).unwrap_or_default();
    format!("{verb} {resource}{separator}{group}{name}")
}

/// A rule of the manifests, and the only namespace where it applies.
struct Rule {
    rule: PolicyRule,
    namespace: Option<&'static str>,
}

impl Rule {
    fn permits(&self, call: &Call) -> bool {
        let has = |list: &Option<Vec<String>>, text: &str| list.iter().flatten().any(|x| x == text);
        let mut names = self.names().iter();
        let is_named =
            names.len() == 0 || names.any(|one| Some(one.as_str()) == call.name.as_deref());
        let is_there = self.namespace.is_none() || self.namespace == call.namespace.as_deref();
        self.rule.verbs.iter().any(|verb| verb == call.verb)
            && has(&self.rule.api_groups, &call.group)
            && has(&self.rule.resources, &call.resource)
            && is_named
            && is_there
    }

    fn names(&self) -> &[String] {
        self.rule.resource_names.as_deref().unwrap_or_default()
    }

    /// The permissions of the rule, as [`Call::permission`].
    fn permissions(&self) -> Vec<(&Rule, String)> {
        let mut names: Vec<_> = self.names().iter().map(|name| Some(&**name)).collect();
        if names.is_empty() {
            names.push(None);
        }
        let mut all = Vec::new();
        for group in self.rule.api_groups.iter().flatten() {
            for resource in self.rule.resources.iter().flatten() {
                for verb in &self.rule.verbs {
                    let names = names.iter();
                    all.extend(names.map(|name| (self, permission(verb, resource, group, *name))));
                }
            }
        }
        all
    }
}

fn rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    for object in objects(include_str!("../../manifests/controller.yaml")) {
        let namespace = match object["kind"].as_str().unwrap() {
            "ClusterRole" => None,
            "Role" => Some(MESH),
            _ => continue,
        };
        let list: Vec<PolicyRule> = serde_json::from_value(object["rules"].clone()).unwrap();
        rules.extend(list.into_iter().map(|rule| Rule { rule, namespace }));
    }
    rules
}

fn objects(text: &str) -> Vec<Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    documents
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

/// The API server, and its address.
struct Api(Arc<Mutex<Objects>>, SocketAddr);

#[derive(Default)]
struct Objects {
    version: u64,
    /// By group, resource, namespace and name.
    objects: BTreeMap<[String; 4], Value>,
    calls: BTreeSet<Call>,
    /// Status subresources whose first write has had a conflict.
    conflicts: BTreeSet<String>,
}

impl Api {
    /// A server with Service shop/web, its meshed pod and its routes.
    async fn start() -> Api {
        let mut state = Objects::default();
        for object in objects(&web(&["10.244.0.6"])) {
            let (group, resource) = match object["kind"].as_str().unwrap() {
                "Service" => ("", "services"),
                "EndpointSlice" => ("discovery.k8s.io", "endpointslices"),
                _ => ("", "pods"),
            };
            let name = object["metadata"]["name"].as_str().unwrap();
            let key = [group, resource, "shop", name].map(String::from);
            state.store(key, object);
        }
        for (kind, resource, version) in [
            ("HTTPRoute", "httproutes", "v1"),
            ("GRPCRoute", "grpcroutes", "v1"),
            ("TCPRoute", "tcproutes", "v1"),
        ] {
            let key = ["gateway.networking.k8s.io", resource, "shop", "web"].map(String::from);
            let route = json!({
                "apiVersion": format!("gateway.networking.k8s.io/{version}"), "kind": kind,
                "metadata": {"generation": 1},
                "spec": {
                    "parentRefs": [{"group": "", "kind": "Service", "name": "web"}],
                    "rules": [{"backendRefs": [{"name": "web", "port": 80}, {
                        "group": "gateway.networking.x-k8s.io", "kind": "XBackend", "name": "api",
                    }]}],
                },
            });
            state.store(key, route);
        }
        let key = ["diy-service-mesh.dev", "trafficpolicies", "shop", "web"].map(String::from);
        let policy = json!({
            "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy",
            "metadata": {"generation": 1},
            "spec": {
                "targetRefs": [{"group": "", "kind": "Service", "name": "web"}],
                "connections": {"maxRequests": 100},
            },
        });
        state.store(key, policy);
        let group = "diy-service-mesh.dev";
        let key = [group, "authorizationpolicies", "shop", "web"].map(String::from);
        let policy = json!({
            "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
            "metadata": {"generation": 1},
            "spec": {
                "targetRefs": [{"group": "", "kind": "ServiceAccount", "name": "web"}],
                "action": "ALLOW", "rules": [{}],
            },
        });
        state.store(key, policy);
        let key = ["split.smi-spec.io", "trafficsplits", "shop", "web"].map(String::from);
        let split = json!({
            "apiVersion": "split.smi-spec.io/v1alpha4", "kind": "TrafficSplit",
            "metadata": {}, "spec": {"service": "none", "backends": []},
        });
        state.store(key, split);
        for (name, version) in DEFINITIONS {
            let key = [
                "apiextensions.k8s.io",
                "customresourcedefinitions",
                "",
                name,
            ];
            let definition = json!({
                "metadata": {}, "spec": {"versions": [{"name": version, "served": true}]},
                "status": {"conditions": [{"type": "Established", "status": "True"}]},
            });
            state.store(key.map(String::from), definition);
        }
        let backend = ["gateway.networking.x-k8s.io", "xbackends", "shop", "api"];
        let spec = json!({
            "type": "ExternalHostname", "externalHostname": {"hostname": "api.example.com"},
            "port": {"port": 443},
        });
        let object = json!({"metadata": {"generation": 1}, "spec": spec});
        state.store(backend.map(String::from), object);
        let mesh = ["gateway.networking.x-k8s.io", "xmeshes", "", "mesh"].map(String::from);
        let spec = json!({"controllerName": "diy-service-mesh.dev/controller"});
        state.store(mesh, json!({"metadata": {"generation": 1}, "spec": spec}));
        let role = "diy-service-mesh-controller";
        let role = ["rbac.authorization.k8s.io", "clusterroles", "", role].map(String::from);
        state.store(role, json!({"metadata": {"uid": "1"}, "rules": []}));
        let (listener, address) = listen().await;
        let api = Api(Arc::default(), address);
        *api.0.lock().unwrap() = state;
        let shared = api.0.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, shared.clone()));
            }
        });
        api
    }

    /// Waits until `read` succeeds.
    async fn until<T, E: std::fmt::Debug>(
        &self,
        what: &str,
        read: impl Fn(&Objects) -> Result<T, E>,
    ) -> T {
        eventually(what, async || read(&self.0.lock().unwrap())).await
    }
}

/// One request of a connection. A watch stays open, without events.
async fn serve(mut stream: TcpStream, objects: Arc<Mutex<Objects>>) {
    let Some(head) = read_head(&mut stream).await else {
        return;
    };
    let fields = head.to_lowercase();
    let length = fields.split("content-length: ").nth(1);
    let length = length.and_then(|rest| rest.lines().next()?.parse().ok());
    let mut body = vec![0; length.unwrap_or_default()];
    stream.read_exact(&mut body).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let mut words = head.split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let response = objects.lock().unwrap().respond(method, path, query, body);
    let head = "Content-Type: application/json\r\nConnection: close\r\n";
    let Some((status, response)) = response else {
        let head = format!("HTTP/1.1 200 OK\r\n{head}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        // Until the client closes the connection.
        let _ = stream.read_u8().await;
        return;
    };
    let body = response.to_string();
    let length = body.len();
    let response = format!("HTTP/1.1 {status} X\r\n{head}Content-Length: {length}\r\n\r\n{body}");
    let _ = stream.write_all(response.as_bytes()).await;
}

impl Objects {
    fn add_report_of_crashed_replica(&mut self) {
        let lease = "diy-service-mesh-replica-crashed";
        let lease = ["coordination.k8s.io", "leases", MESH, lease].map(String::from);
        let metadata = json!({"annotations": {"diy-service-mesh.dev/report": "{}"}});
        let spec = json!({"holderIdentity": "crashed"});
        self.store(lease, json!({"metadata": metadata, "spec": spec}));
    }

    fn add_outdated_edges(&mut self) {
        let name = "diy-service-mesh-edges-gone";
        let labels = json!({"diy-service-mesh.dev/edges": "gone"});
        let key = ["", "configmaps", MESH, name].map(String::from);
        self.store(key, json!({"metadata": {"labels": labels}}));
    }

    fn store(&mut self, key: [String; 4], mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["name"] = json!(key[3]);
        if !key[2].is_empty() {
            object["metadata"]["namespace"] = json!(key[2]);
        }
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(key, object.clone());
        object
    }

    fn get(&self, group: &str, resource: &str, name: &str) -> Option<&Value> {
        let is_it = |key: &[String; 4]| key[0] == group && key[1] == resource && key[3] == name;
        let mut found = self.objects.iter().filter(|(key, _)| is_it(key));
        found.next().map(|(_, object)| object)
    }

    /// The response. `None` for a watch.
    fn respond(
        &mut self,
        method: &str,
        path: &str,
        query: &str,
        mut body: Value,
    ) -> Option<(u16, Value)> {
        // Everyone may read it.
        if path == "/version" {
            return Some((200, json!({})));
        }
        let call = parse(method, path, query);
        self.calls.insert(call.clone());
        let Call {
            verb,
            group,
            namespace,
            resource,
            name,
        } = call;
        let main = resource.split('/').next().unwrap().to_owned();
        let key = |name: String| {
            let namespace = namespace.clone().unwrap_or_default();
            [group.clone(), main.clone(), namespace, name]
        };
        let failure = |code: u16, reason: &str| json!({"kind": "Status", "status": "Failure", "code": code, "message": reason, "reason": reason});
        Some(match (verb, name) {
            ("watch", _) => return None,
            ("list", name) => {
                let is_listed = |key: &[String; 4]| {
                    (&key[0], &key[1]) == (&group, &main)
                        && namespace.as_ref().is_none_or(|one| *one == key[2])
                        && name.as_ref().is_none_or(|one| *one == key[3])
                };
                let listed = self.objects.iter().filter(|(key, _)| is_listed(key));
                let items: Vec<&Value> = listed.map(|(_, object)| object).collect();
                let metadata = json!({"resourceVersion": self.version.to_string()});
                (
                    200,
                    json!({"kind": "List", "items": items, "metadata": metadata}),
                )
            }
            ("deletecollection", _) => (200, json!({"kind": "Status", "status": "Success"})),
            ("create", _) if main == "tokenreviews" => {
                body["status"] = json!({
                    "authenticated": true, "audiences": ["diy-service-mesh"],
                    "user": {"username": "system:serviceaccount:shop:web", "extra": {
                        "authentication.kubernetes.io/pod-name": ["web-1"],
                        "authentication.kubernetes.io/pod-uid": ["1"],
                    }},
                });
                (201, body)
            }
            ("create", _) if main == "subjectaccessreviews" => {
                body["status"] = json!({"allowed": true});
                (201, body)
            }
            ("create", _) => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                let key = key(name);
                if self.objects.contains_key(&key) {
                    (409, failure(409, "AlreadyExists"))
                } else {
                    (201, self.store(key, body))
                }
            }
            (_, Some(name)) => {
                let key = key(name);
                let current = self.objects.get(&key).cloned();
                match (verb, current) {
                    ("get", Some(object)) => (200, object),
                    ("delete", Some(object)) => {
                        self.objects.remove(&key);
                        (200, object)
                    }
                    ("patch", None)
                        if query.contains("fieldManager")
                            && matches!(&*main, "configmaps" | "leases") =>
                    {
                        // Server-side apply creates the object, if that is permitted too.
                        self.calls.insert(Call {
                            verb: "create",
                            group: group.clone(),
                            namespace: namespace.clone(),
                            resource,
                            name: None,
                        });
                        (201, self.store(key, body))
                    }
                    ("update", Some(_))
                        if resource.ends_with("/status") && self.conflicts.insert(path.into()) =>
                    {
                        (409, failure(409, "Conflict"))
                    }
                    (_, None) => (404, failure(404, "NotFound")),
                    ("patch", Some(mut object)) => {
                        merge(&mut object, body);
                        (200, self.store(key, object))
                    }
                    (_, Some(_)) => (200, self.store(key, body)),
                }
            }
            (verb, None) => panic!("{verb} {path}"),
        })
    }
}

/// A merge patch (RFC 7396).
fn merge(object: &mut Value, patch: Value) {
    match patch {
        Value::Object(patch) => {
            for (name, value) in patch {
                match value {
                    Value::Null => drop(object.as_object_mut().map(|object| object.remove(&name))),
                    value => merge(&mut object[name], value),
                }
            }
        }
        value => *object = value,
    }
}

fn parse(method: &str, path: &str, query: &str) -> Call {
    let mut parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let group = match parts.remove(0) {
        "api" => String::new(),
        _ => parts.remove(0).to_owned(),
    };
    parts.remove(0);
    let namespace = (parts[0] == "namespaces" && parts.len() > 2).then(|| {
        parts.remove(0);
        parts.remove(0).to_owned()
    });
    let mut name = parts.get(1).map(|name| (*name).to_owned());
    // RBAC takes the name of a LIST from its field selector.
    let selected = query.split('&').find_map(|part| {
        let part = part.replace("%3D", "=");
        let name = part.strip_prefix("fieldSelector=metadata.name=")?;
        Some(name.to_owned())
    });
    let verb = match method {
        "GET" if name.is_some() => "get",
        "GET" if query.contains("watch=true") => "watch",
        "GET" => "list",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" if name.is_none() => "deletecollection",
        "DELETE" => "delete",
        other => panic!("unexpected method {other}"),
    };
    name = name.or(selected);
    let resource = match parts.get(2) {
        Some(subresource) => format!("{}/{subresource}", parts[0]),
        None => parts[0].to_owned(),
    };
    Call {
        verb,
        group,
        namespace,
        resource,
        name,
    }
}
