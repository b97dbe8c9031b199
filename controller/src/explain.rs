//! Descriptions of the state in force: the routes of a Service, and the permitted callers of pods.
//! They are read from the controller's index, or from an index of objects in files. Pure: the index
//! decides, as in discovery.

pub mod authorization;

use std::collections::BTreeSet;

use diy_mesh_model::identity::TRUST_DOMAIN;
use diy_mesh_proto::mesh::v1 as proto;
use proto::GetRoutesResponse;
use proto::field_match::Kind as FieldKind;
use proto::get_routes_response::{Backend, Port, Rule as Row};
use proto::path_match::Kind as PathKind;
use proto::route_filter::Kind as FilterKind;
use serde_json::Value;

use crate::catalog::{self, Change};
use crate::index::Index;
use crate::index::outcome::shown;
use crate::kinds::route::attach::Table;
use crate::kinds::route::filters::is_redirect;
use crate::kinds::route::model::{Match, Rule};
use crate::object::{Key, Kind, ObjectId, ObjectStatus, TargetReference};

/// The statuses of the routes and policies among these objects.
pub fn statuses(objects: &[Value]) -> Vec<ObjectStatus> {
    index(objects, "", TRUST_DOMAIN).0.route_statuses()
}

/// The pods among these objects that may be open by mistake: a line for each ALLOW policy with a
/// Service without pods.
pub fn opened(objects: &[Value]) -> Vec<String> {
    let (index, _) = index(objects, "", TRUST_DOMAIN);
    let describe = |(policy, service, pods): (&Key, String, Vec<&Key>)| {
        let (policy, pods) = (
            crate::kinds::authorization::name(policy),
            shown(pods.iter()),
        );
        format!("{policy}: the {service} leads to no pod with a proxy; no ALLOW covers {pods}")
    };
    index.opened().into_iter().map(describe).collect()
}

/// An index of these objects, and the errors and unknown fields in them. The last of several
/// objects with one name counts. `mesh`: the namespace of the mesh.
pub fn index(objects: &[Value], mesh: &str, trust_domain: &str) -> (Index, Vec<String>) {
    let mut index = Index::of_mesh(mesh);
    let mut problems = Vec::new();
    for object in objects {
        match catalog::parse_object(object, trust_domain) {
            Ok(mut parsed) => {
                for object in parsed.objects {
                    // Others are not written by hand, and a cluster may be of a later release.
                    if object.kind().is_custom() {
                        problems.append(&mut parsed.unknown_fields);
                    }
                    index.apply(Change::Apply(object));
                }
            }
            Err(error) => {
                let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
                let metadata = &object["metadata"];
                let (namespace, name) = (text(&metadata["namespace"]), text(&metadata["name"]));
                let kind = text(&object["kind"]);
                problems.push(format!("{kind} {namespace}/{name}: {error}"));
            }
        }
    }
    (index, problems)
}

/// Explains the requests of the clients of a namespace to a Service, as these objects say. `None`:
/// it is not among them.
pub fn explain(objects: &[Value], service: &Key, clients: &str) -> Option<GetRoutesResponse> {
    let (index, mut problems) = index(objects, "", TRUST_DOMAIN);
    let explained = summary(&index, service, clients)?;
    for id in deciding(&index, service, clients) {
        problems.append(&mut problems_of(&index, service, &id));
    }
    let ports = tcp_ports(&index, service).into_iter();
    Some(GetRoutesResponse {
        ports: ports
            .map(|one| port(&index, service, one, clients)())
            .collect(),
        problems,
        ..explained
    })
}

/// The policies of a Service. `None`: it does not exist.
pub fn summary(index: &Index, service: &Key, clients: &str) -> Option<GetRoutesResponse> {
    index.service_object(service)?;
    let policy = index.policy(service);
    let of_backend = policy.and_then(|policy| policy.backend.as_deref());
    let of_backend = of_backend
        .into_iter()
        .flat_map(|policy| policy.name.split(", "));
    let limits = policy.and_then(|policy| policy.rate_limits.as_deref());
    let limits = limits.into_iter().flatten().map(|limit| &*limit.name);
    let telemetry = policy.and_then(|policy| policy.telemetry.as_deref());
    let telemetry = telemetry
        .into_iter()
        .flat_map(|telemetry| telemetry.name.split(", "));
    let policies: BTreeSet<&str> = of_backend.chain(limits).chain(telemetry).collect();
    Some(GetRoutesResponse {
        service: service.to_string(),
        clients: clients.to_owned(),
        policies: policies.into_iter().map(str::to_owned).collect(),
        ..GetRoutesResponse::default()
    })
}

/// The objects that decide about the requests of these clients, from their namespace and from the
/// namespace of the Service.
pub fn deciding(index: &Index, service: &Key, clients: &str) -> Vec<ObjectId> {
    let all = index.objects_of_service(service).into_iter();
    let own = all.filter(|(_, key)| [&*service.namespace, clients].contains(&&*key.namespace));
    own.collect()
}

/// The conditions of an object for the Service that do not hold.
pub fn problems_of(index: &Index, service: &Key, id: &ObjectId) -> Vec<String> {
    let status = index.status(id).ok().flatten();
    let of_status = status
        .iter()
        .flat_map(|status| problems(status, |parent| parent.key(&status.key) == *service));
    of_status.collect()
}

/// The conditions of an object for some of its parents that do not hold.
fn problems(status: &ObjectStatus, is_parent: impl Fn(&TargetReference) -> bool) -> Vec<String> {
    let parents = status.parents.iter();
    let parents = parents.filter(|parent| is_parent(&parent.parent));
    let conditions = parents.flat_map(|parent| &parent.conditions);
    let conditions = conditions.filter(|one| one.is_problem());
    let text = conditions.map(|one| {
        let is = format!("{} is {}, {}", one.kind, one.status(), one.reason);
        format!("{} {}: {is}: {}", status.kind, status.key, one.message)
    });
    text.collect()
}

/// The conditions of AuthorizationPolicies that do not hold.
pub fn problems_of_authorization(index: &Index) -> Vec<String> {
    let statuses = index.route_statuses().into_iter();
    let policies = statuses.filter(|status| status.kind == Kind::Authorization);
    policies
        .flat_map(|status| problems(&status, |_| true))
        .collect()
}

/// The TCP ports of a Service.
pub fn tcp_ports(index: &Index, service: &Key) -> Vec<u16> {
    let service = index.service_object(service).into_iter();
    let ports = service.flat_map(|service| service.tcp_ports());
    ports.map(|port| port.port).collect()
}

/// The requests to a port of a Service. The result describes them: that takes time for a large table,
/// and needs the index no more.
pub fn port(
    index: &Index,
    service: &Key,
    port: u16,
    clients: &str,
) -> impl FnOnce() -> Port + use<> {
    let service_object = index.service_object(service);
    let is_headless = service_object.is_some_and(|one| one.is_headless);
    let name = format!("{service}:{port}");
    let table = index.table(service, port, clients).cloned();
    let servers = table
        .as_ref()
        .map(|table| index.servers(service, port, table));
    let servers = servers.unwrap_or_default();
    move || Port {
        port: port.into(),
        rules: match table {
            Some(table) => rows(&table, &servers, &name, is_headless),
            None => vec![unrouted(&name)],
        },
    }
}

/// Requests that no rule concerns, without any route.
fn unrouted(service: &str) -> Row {
    Row {
        requests: "all".to_owned(),
        backends: vec![of_service(service)],
        ..Row::default()
    }
}

fn of_service(service: &str) -> Backend {
    Backend {
        service: Some(service.to_owned()),
        weight: 1,
    }
}

/// The requests to a headless Service stay at the pod that the client has selected.
fn rows(table: &Table, servers: &[Option<String>], service: &str, is_headless: bool) -> Vec<Row> {
    let row = |rule: &Rule| row(&rule.message(), service, is_headless);
    let faults = table.faults().iter().map(fault);
    let rules = table.rules.iter().enumerate().map(|(position, rule)| {
        let mut row = row(rule);
        let server = servers.get(position).into_iter().flatten();
        row.actions.extend(server.map(|server| asks(server)));
        row
    });
    let rules: Vec<Row> = rules.collect();
    let matches = table.matches.iter().map(|(position, one)| {
        let rule = usize::try_from(*position).ok();
        let rule = rule.and_then(|position| rules.get(position).cloned());
        let requests = conditions(one);
        Row {
            requests,
            ..rule.unwrap_or_default()
        }
    });
    let matches: Vec<Row> = matches.collect();
    let is_complete = matches.iter().any(|row| row.requests == "all");
    let others = match (table.matches.is_empty(), table.grpc) {
        (true, _) => unrouted(service),
        (false, grpc) => Row {
            requests: "all others".to_owned(),
            actions: vec![if grpc { "UNIMPLEMENTED" } else { "status 404" }.to_owned()],
            ..Row::default()
        },
    };
    let connections = table.tcp.iter().map(|rule| Row {
        requests: "connections without HTTP".to_owned(),
        ..row(rule)
    });
    let others = (!is_complete).then_some(others);
    faults
        .chain(matches)
        .chain(others)
        .chain(connections)
        .collect()
}

fn row(rule: &proto::RouteRule, service: &str, is_headless: bool) -> Row {
    // The rule does not choose a backend.
    let stays = is_headless || rule.to_destination;
    let backends = rule.backends.iter().map(|backend| Backend {
        service: match &backend.external {
            Some(proto::ExternalBackend {
                name, host, port, ..
            }) => Some(format!("{name} ({host}:{port})")),
            None => Some(backend.name.clone()).filter(|name| !name.is_empty()),
        },
        weight: backend.weight,
    });
    let redirects = rule.filters.iter().any(is_redirect);
    let backends = if stays && !rule.invalid && !redirects {
        vec![of_service(service)]
    } else {
        backends.collect()
    };
    let mut actions: Vec<String> = rule.filters.iter().map(action).collect();
    if rule.invalid {
        actions.push("status 500".to_owned());
    }
    let of_backends = rule.backends.iter().filter(|_| !stays);
    let of_backends = of_backends.flat_map(|backend| &backend.filters);
    actions.extend(of_backends.map(|filter| format!("{} of a backend", action(filter))));
    let timeout = |name: &str, timeout: u64| (timeout > 0).then(|| format!("{name} {timeout}ms"));
    actions.extend(timeout("timeout", rule.request_timeout));
    actions.extend(timeout(
        "timeout of an attempt",
        rule.backend_request_timeout,
    ));
    actions.extend(rule.retry.as_ref().map(|retry| {
        let statuses: Vec<String> = retry.statuses.iter().map(u32::to_string).collect();
        format!("{} retries of [{}]", retry.attempts, statuses.join(", "))
    }));
    actions.extend(
        rule.session_persistence
            .as_ref()
            .map(|_| "sessions".to_owned()),
    );
    Row {
        requests: String::new(),
        from: Some(rule.name.clone()),
        backends,
        actions,
    }
}

fn fault(fault: &proto::Fault) -> Row {
    let share = |share: Option<proto::Share>| {
        let share = share.unwrap_or_default();
        format!("{} of {}", share.numerator, share.denominator)
    };
    let delay =
        (fault.delay > 0).then(|| format!("delay {}ms for {}", fault.delay, share(fault.delayed)));
    let abort = (fault.abort_status > 0)
        .then(|| format!("status {} for {}", fault.abort_status, share(fault.aborted)));
    let requests = match fault.matches.len() {
        0 => "all, before the rules".to_owned(),
        matches => format!("requests of {matches} matches, before the rules"),
    };
    Row {
        requests,
        from: Some(fault.name.clone()),
        backends: Vec::new(),
        actions: delay.into_iter().chain(abort).collect(),
    }
}

/// The conditions of a match, "all" if there are none.
fn conditions(one: &Match) -> String {
    let message = &one.message;
    let method = Some(message.method.clone()).filter(|method| !method.is_empty());
    let path = one.path().and_then(|path| match path {
        PathKind::Exact(path) => Some(format!("path {path}")),
        PathKind::Prefix(prefix) if prefix == "/" => None,
        PathKind::Prefix(prefix) => Some(format!("path {}/...", prefix.trim_end_matches('/'))),
        PathKind::Regex(regex) => Some(format!("path ~ {regex}")),
    });
    let field = |kind: &str, proto::FieldMatch { name, kind: value }: &proto::FieldMatch| {
        Some(match value.as_ref()? {
            FieldKind::Exact(value) => format!("{kind} {name}={value}"),
            FieldKind::Regex(regex) => format!("{kind} {name} ~ {regex}"),
        })
    };
    let headers = message.headers.iter().flat_map(|one| field("header", one));
    let query = message.query.iter().flat_map(|one| field("parameter", one));
    let all = method.into_iter().chain(path).chain(headers).chain(query);
    let all: Vec<String> = all.collect();
    if all.is_empty() {
        "all".to_owned()
    } else {
        all.join(", ")
    }
}

/// The decision of the called pods about the requests of a rule.
fn asks(server: &str) -> String {
    match server {
        "" => "refused by the called pods".to_owned(),
        server => format!("{server} decides"),
    }
}

fn action(filter: &proto::RouteFilter) -> String {
    match &filter.kind {
        Some(FilterKind::RequestHeaders(_)) => "changes request headers".to_owned(),
        Some(FilterKind::ResponseHeaders(_)) => "changes response headers".to_owned(),
        Some(FilterKind::Redirect(redirect)) => format!("redirect {}", redirect.status),
        Some(FilterKind::Rewrite(_)) => "rewrite".to_owned(),
        Some(FilterKind::Cors(_)) => "CORS".to_owned(),
        Some(FilterKind::Mirror(mirror)) => {
            let (numerator, denominator) = (mirror.numerator, mirror.denominator);
            format!("mirror {numerator} of {denominator} to {}", mirror.backend)
        }
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(name: &str, ip: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"clusterIP": ip, "ports": [{"port": 80}]}})
    }

    fn route(name: &str, namespace: &str, rules: Value) -> Value {
        json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"rules": rules, "parentRefs": [
            {"group": "", "kind": "Service", "name": "web", "namespace": "shop"},
        ]}})
    }

    /// A line a row: requests, object, backends, actions.
    fn text(objects: &[Value], clients: &str) -> Vec<String> {
        let web = explain(objects, &Key::new("shop", "web"), clients).unwrap();
        let line = |row: &Row| {
            let backend = |Backend { service, weight }: &Backend| {
                format!("{} {weight}", service.as_deref().unwrap_or("invalid"))
            };
            let backends: Vec<String> = row.backends.iter().map(backend).collect();
            let from = row.from.as_deref().unwrap_or("-");
            format!(
                "{} | {from} | {} | {}",
                row.requests,
                backends.join(", "),
                row.actions.join(", ")
            )
        };
        let mut lines: Vec<String> = web.ports[0].rules.iter().map(line).collect();
        lines.extend(web.policies);
        lines.extend(web.problems);
        lines
    }

    #[test]
    fn rows_are_in_the_order_in_which_they_apply() {
        let mut objects = vec![service("web", "10.0.0.1"), service("next", "10.0.0.2")];
        assert_eq!(text(&objects, "shop"), ["all | - | shop/web:80 1 | "]);
        let next = json!([{"name": "next", "port": 80, "weight": 9}, {"name": "none", "port": 80}]);
        objects.push(route(
            "canary",
            "shop",
            json!([
                {"matches": [{"path": {"value": "/"}}], "backendRefs": next},
                {"matches": [{"path": {"type": "Exact", "value": "/old"}, "method": "GET"}],
                 "filters": [{"type": "RequestRedirect", "requestRedirect": {"statusCode": 301}}]},
            ]),
        ));
        objects.push(
            json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy",
            "metadata": {"name": "all", "namespace": "shop"},
            "spec": {
                "targetRefs": [{"group": "", "kind": "Namespace", "name": "shop"}],
                "timeouts": {"request": "2s"}, "circuitBreaker": {"failurePercent": 50},
                "faults": [{"abort": {"status": 503, "percent": 5}}],
            }}),
        );
        let expected = [
            "all, before the rules | TrafficPolicy shop/all |  | status 503 for 5 of 100",
            "GET, path /old | HTTPRoute shop/canary |  | redirect 301, timeout 2000ms",
            "all | HTTPRoute shop/canary | shop/next:80 9, invalid 1 | timeout 2000ms",
            "TrafficPolicy shop/all",
            "HTTPRoute shop/canary: ResolvedRefs is False, BackendNotFound: \
             spec.rules[0].backendRefs[1]: the Service shop/none does not exist",
        ];
        assert_eq!(text(&objects, "shop"), expected);
    }

    #[test]
    fn hosts_outside_of_the_cluster_are_named() {
        let backend = |name: &str| {
            json!({"apiVersion": "gateway.networking.x-k8s.io/v1alpha1",
            "kind": "XBackend", "metadata": {"name": name, "namespace": "shop"},
            "spec": {"type": "ExternalHostname", "port": {"port": 443},
                "externalHostname": {"hostname": "api.example.com"}}})
        };
        let to = |name: &str| json!({"group": "gateway.networking.x-k8s.io", "kind": "XBackend", "name": name});
        let policy = json!({"apiVersion": "diy-service-mesh.dev/v1alpha1",
            "kind": "TrafficPolicy", "metadata": {"name": "api", "namespace": "shop"},
            "spec": {"backend": {"type": "ExternalHostname", "port": {"port": 80},
                "externalHostname": {"hostname": "b.example.com"}}}});
        let to_policy =
            json!({"group": "diy-service-mesh.dev", "kind": "TrafficPolicy", "name": "api"});
        let rules = json!([{"backendRefs": [to("api"), to("none"), to_policy]}]);
        let objects = [
            service("web", "10.0.0.1"),
            backend("api"),
            policy,
            route("r", "shop", rules),
        ];
        let expected = "all | HTTPRoute shop/r | XBackend shop/api (api.example.com:443) 1, \
                        invalid 1, TrafficPolicy shop/api (b.example.com:80) 1 | ";
        assert_eq!(text(&objects, "shop")[0], expected);
    }

    #[test]
    fn servers_that_the_called_pods_ask_are_named() {
        let mut web = service("web", "10.0.0.1");
        web["spec"]["selector"] = json!({"app": "web"});
        let filter = |name: &str| {
            let backend = json!({"name": name, "port": 80});
            json!([{"type": "ExternalAuth", "externalAuth": {"protocol": "GRPC", "backendRef": backend}}])
        };
        let to = json!([{"name": "web", "namespace": "shop", "port": 80}]);
        let rules = json!([
            {"matches": [{"path": {"value": "/a"}}], "filters": filter("auth"), "backendRefs": to},
            {"matches": [{"path": {"value": "/b"}}], "filters": filter("none"), "backendRefs": to},
            {"backendRefs": to},
        ]);
        let auth = service("auth", "10.0.0.2");
        let objects = [web, auth, route("r", "shop", rules)];
        let lines = text(&objects, "shop");
        assert_eq!(
            lines[..3],
            [
                "path /a/... | HTTPRoute shop/r | shop/web:80 1 | shop/auth:80 decides",
                "path /b/... | HTTPRoute shop/r | shop/web:80 1 | refused by the called pods",
                "all | HTTPRoute shop/r | shop/web:80 1 | ",
            ]
        );
        assert_eq!(text(&objects, "other")[..3], lines[..3]);
    }

    #[test]
    fn unknown_fields_of_routes_are_problems() {
        let mut web = service("web", "10.0.0.1");
        web["spec"]["ofALaterRelease"] = json!(1);
        let objects = [web, route("r", "shop", json!([{"backendRef": []}]))];
        let lines = text(&objects, "shop");
        let expected = "HTTPRoute shop/r: unknown field \"spec.rules[0].backendRef\"";
        assert_eq!(lines[1..], [expected]);
    }

    #[test]
    fn older_headless_services_are_problems() {
        let headless = |name: &str, created: &str| {
            let mut headless = service(name, "None");
            headless["metadata"]["creationTimestamp"] = json!(created);
            headless["spec"]["selector"] = json!({"app": "web"});
            headless
        };
        let slice = |name: &str| {
            json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": "shop",
                "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{
                "addresses": ["10.1.0.1"], "targetRef":
                    {"kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "1"}}]})
        };
        let objects = [
            headless("web", "2026-02-01T00:00:00Z"),
            headless("all", "2026-01-01T00:00:00Z"),
            json!({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": []}, "metadata":
                {"name": "web-0", "namespace": "shop", "uid": "1", "labels": {"app": "web"}}}),
            slice("web"),
            slice("all"),
            route("r", "shop", json!([{}])),
        ];
        let lines = text(&objects, "shop");
        let expected = "HTTPRoute shop/r: diy-service-mesh.dev/AppliesToAllPods is False, \
             OlderService: routes and policies of older headless Services apply to 1 of the pods \
             of shop/web: shop/all (pods web-0)";
        assert_eq!(lines.last().unwrap(), expected);
    }

    #[test]
    fn rules_of_a_headless_service_have_no_backends() {
        let canary = json!([
            {"matches": [{"path": {"type": "Exact", "value": "/old"}}],
             "filters": [{"type": "RequestRedirect", "requestRedirect": {"statusCode": 301}}]},
            {"timeouts": {"request": "2s"}, "backendRefs": [
                {"name": "next", "port": 80, "weight": 9},
                {"name": "none", "port": 80, "filters": [
                    {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["a"]}},
                ]},
            ]},
        ]);
        let objects = [service("web", "None"), route("canary", "shop", canary)];
        let expected = [
            "path /old | HTTPRoute shop/canary |  | redirect 301",
            "all | HTTPRoute shop/canary | shop/web:80 1 | timeout 2000ms",
        ];
        assert_eq!(text(&objects, "shop")[..2], expected);
    }

    #[test]
    fn clients_of_another_namespace_have_their_own_routes() {
        let only = json!([{"matches": [{"headers": [{"name": "x", "value": "1"}]}],
            "backendRefs": [{"name": "web", "namespace": "shop", "port": 80}]}]);
        let objects = [service("web", "10.0.0.1"), route("own", "other", only)];
        assert_eq!(text(&objects, "shop"), ["all | - | shop/web:80 1 | "]);
        let expected = [
            "header x=1 | HTTPRoute other/own | shop/web:80 1 | ",
            "all others | - |  | status 404",
        ];
        assert_eq!(text(&objects, "other"), expected);
        assert_eq!(explain(&objects, &Key::new("shop", "next"), "shop"), None);
    }
}
