//! HTTPRoutes, GRPCRoutes and TCPRoutes with Services as parents: what their authors wrote, and the
//! conditions that the mesh has written to their status. Pure, except for the requests to the API
//! server.

use diy_mesh_controller::catalog::resources;
use diy_mesh_controller::object::condition::PARTIALLY_INVALID;
use diy_mesh_controller::object::{Kind, kind};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::ListParams,
    core::{ApiResource, DynamicObject},
};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::cluster::{self, describe_error};

/// The API group of routes.
pub const GROUP: &str = kind::GATEWAY;
/// The `controllerName` of the entries of the mesh in `status.parents`.
pub(crate) const CONTROLLER_NAME: &str = "diy-service-mesh.dev/controller";

/// A route with its parents and backends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Route {
    /// HTTPRoute, GRPCRoute or TCPRoute.
    pub kind: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The Services among its parents.
    pub parents: Vec<Parent>,
    /// The backends by rule.
    #[serde(serialize_with = "with_backends")]
    pub rules: Vec<Vec<Backend>>,
}

/// A Service whose requests the route handles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Parent {
    /// NAMESPACE/NAME.
    pub service: String,
    /// The port. `None`: all ports.
    pub port: Option<u64>,
    /// The conditions for the current generation of the route. Empty until the mesh has written
    /// them.
    pub conditions: Vec<Condition>,
}

/// A condition of the mesh for a parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Condition {
    /// "Accepted", "ResolvedRefs", ...
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether it holds.
    #[serde(rename = "status")]
    pub holds: bool,
    /// A word of the specification.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// The destination of requests, with its share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Backend {
    /// NAMESPACE/NAME:PORT of a Service, with the kind in front if it is another.
    pub target: String,
    /// The weight among the backends of the rule.
    pub weight: u64,
}

impl Condition {
    /// "True" or "False".
    pub fn status(&self) -> &'static str {
        if self.holds { "True" } else { "False" }
    }
}

impl Route {
    /// Reads a route. `None` if it has no Service as parent, or is of another kind.
    pub fn read(object: &Value) -> Option<Self> {
        let kind = text(&object["kind"]);
        let metadata = &object["metadata"];
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        let references = list(&object["spec"]["parentRefs"]);
        let parents = references
            .filter(|reference| is_service(reference, "Gateway", GROUP))
            .map(|reference| parent(object, reference, namespace));
        let parents: Vec<Parent> = parents.collect();
        if parents.is_empty() || !Kind::routes().any(|one| one.name() == kind) {
            return None;
        }
        let backends = |rule: &Value| {
            let backends = list(&rule["backendRefs"]);
            backends.map(|one| backend(one, namespace)).collect()
        };
        Some(Self {
            kind,
            namespace: namespace.to_owned(),
            name: text(&metadata["name"]),
            parents,
            rules: list(&object["spec"]["rules"]).map(backends).collect(),
        })
    }

    /// `HTTPRoute NAMESPACE/NAME`.
    pub fn title(&self) -> String {
        format!("{} {}/{}", self.kind, self.namespace, self.name)
    }
}

fn with_backends<S: Serializer>(rules: &[Vec<Backend>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rules.iter().map(|backends| json!({"backends": backends})))
}

impl Parent {
    /// `NAMESPACE/NAME:PORT`, or `NAMESPACE/NAME` for all ports.
    pub fn title(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.service),
            None => self.service.clone(),
        }
    }

    /// Conditions of the mesh itself that do not hold, and that a part of the route is invalid.
    pub fn problems(&self) -> impl Iterator<Item = &Condition> {
        let domain = format!("{}/", kind::GROUP);
        let own = self.conditions.iter();
        own.filter(move |one| match &*one.kind {
            PARTIALLY_INVALID => one.holds,
            kind => kind.starts_with(&domain) && !one.holds,
        })
    }

    /// The condition with this type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions
            .iter()
            .find(|condition| condition.kind == kind)
    }
}

fn parent(object: &Value, reference: &Value, namespace: &str) -> Parent {
    let is_same = |other: &Value| {
        let of = |reference: &Value| {
            let namespace = reference["namespace"].as_str().unwrap_or(namespace);
            let fields = ["name", "port", "sectionName"].map(|field| reference[field].clone());
            (namespace.to_owned(), fields)
        };
        is_service(other, "Gateway", GROUP) && of(other) == of(reference)
    };
    let generation = object["metadata"]["generation"].as_i64();
    let is_current = |condition: &Value| condition["observedGeneration"].as_i64() >= generation;
    let conditions = conditions(&object["status"]);
    let conditions = conditions.filter(|(parent, one)| is_same(parent) && is_current(one));
    let condition = |(_, condition): (&Value, &Value)| Condition {
        kind: text(&condition["type"]),
        holds: condition["status"] == "True",
        reason: text(&condition["reason"]),
        message: text(&condition["message"]),
    };
    Parent {
        service: named(reference, namespace),
        port: reference["port"].as_u64(),
        conditions: conditions.map(condition).collect(),
    }
}

/// The conditions of the mesh in a status, each with the reference to its parent or target.
pub(crate) fn conditions(status: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    let entries = list(&status["parents"]).chain(list(&status["ancestors"]));
    let own = entries.filter(|entry| entry["controllerName"] == CONTROLLER_NAME);
    own.flat_map(|entry| {
        let target = entry.get("parentRef").unwrap_or(&entry["ancestorRef"]);
        list(&entry["conditions"]).map(move |condition| (target, condition))
    })
}

fn backend(reference: &Value, namespace: &str) -> Backend {
    let kind = reference["kind"].as_str().unwrap_or("Service");
    let prefix = if is_service(reference, "Service", "") {
        String::new()
    } else {
        format!("{kind} ")
    };
    let port = reference["port"].as_u64();
    let port = port.map_or(String::new(), |port| format!(":{port}"));
    Backend {
        target: format!("{prefix}{}{port}", named(reference, namespace)),
        weight: reference["weight"].as_u64().unwrap_or(1),
    }
}

/// Whether a reference, with these defaults, is to a Service.
fn is_service(reference: &Value, kind: &str, group: &str) -> bool {
    reference["kind"].as_str().unwrap_or(kind) == "Service"
        && matches!(reference["group"].as_str().unwrap_or(group), "" | "core")
}

fn named(reference: &Value, namespace: &str) -> String {
    let namespace = reference["namespace"].as_str().unwrap_or(namespace);
    format!(
        "{namespace}/{}",
        reference["name"].as_str().unwrap_or_default()
    )
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub(crate) fn list(value: &Value) -> std::slice::Iter<'_, Value> {
    let list = value.as_array().map(Vec::as_slice);
    list.unwrap_or_default().iter()
}

/// Lists the objects of these kinds in a namespace, or in all, each in the first of its versions
/// that the cluster serves. A kind that is not installed has no objects.
pub async fn fetch(
    client: &Client,
    namespace: Option<&str>,
    kinds: impl IntoIterator<Item = Kind>,
) -> Result<Vec<Value>, String> {
    let mut all = Vec::new();
    for kind in kinds {
        for resource in resources(kind) {
            let api = cluster::dynamic(client, &resource, namespace);
            let items = cluster::list(api, &ListParams::default()).await?;
            let is_served = !items.is_empty();
            all.extend(items.into_iter().map(|item| {
                // Items of a list have no kind.
                let mut object = json!(item);
                object["kind"] = kind.name().into();
                object["apiVersion"] = resource.api_version.clone().into();
                object
            }));
            if is_served {
                break;
            }
        }
    }
    Ok(all)
}

/// Reads the definitions of the Gateway API and of policies that the mesh uses, of those that are
/// installed.
pub async fn definitions(client: &Client) -> Result<Vec<Value>, String> {
    let gateway = ["httproutes", "grpcroutes", "referencegrants", "tcproutes"];
    let gateway = gateway.map(|plural| format!("{plural}.{GROUP}"));
    let policies = ["trafficpolicies", "authorizationpolicies"];
    let policies = policies.map(|plural| format!("{plural}.{}", kind::GROUP));
    let resource = ApiResource::erase::<CustomResourceDefinition>(&());
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut definitions = Vec::new();
    for name in gateway.iter().chain(&policies) {
        let found = api.get_opt(name).await.map_err(describe_error)?;
        definitions.extend(found.map(|found| json!(found)));
    }
    Ok(definitions)
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use super::testing::{condition, route};
    use super::*;

    #[test]
    fn reads_parents_backends_and_conditions() {
        let status = json!([condition("Accepted", "True", "Accepted")]);
        let read = Route::read(&route(status)).unwrap();
        assert_eq!(read.title(), "HTTPRoute shop/canary");
        let [parent] = &read.parents[..] else {
            panic!("{read:?}")
        };
        assert_eq!(parent.title(), "shop/web:80");
        assert!(parent.condition("Accepted").unwrap().holds);
        let targets: Vec<(&str, u64)> = read
            .rules
            .iter()
            .flatten()
            .map(|backend| (backend.target.as_str(), backend.weight))
            .collect();
        let expected = [
            ("shop/web-v1:80", 90),
            ("shop/web-v2:80", 10),
            ("Bucket data/files", 1),
        ];
        assert_eq!(targets, expected);
    }

    #[test]
    fn conditions_of_an_earlier_generation_or_another_controller_do_not_count() {
        let mut object = route(json!([condition("Accepted", "True", "Accepted")]));
        object["metadata"]["generation"] = json!(3);
        assert_eq!(Route::read(&object).unwrap().parents[0].conditions, []);
        object["metadata"]["generation"] = json!(2);
        object["status"]["parents"][0]["controllerName"] = json!("example.net/x");
        assert_eq!(Route::read(&object).unwrap().parents[0].conditions, []);
    }

    /// An API server whose user may list some kinds in `shop` only. It serves ReferenceGrant v1 only.
    fn namespaced() -> Client {
        let service = tower::service_fn(|request: hyper::Request<kube::client::Body>| async move {
            let path = request.uri().path().to_owned();
            let list = json!({"kind": "List", "metadata": {}, "items": [
                {"metadata": {"name": "web", "namespace": "shop"}},
            ]});
            let status = |code: u16| json!({"kind": "Status", "status": "Failure", "code": code, "message": path, "reason": ""});
            let (code, body) = match &*path {
                "/api/v1/namespaces/shop/services"
                | "/apis/gateway.networking.k8s.io/v1/namespaces/shop/httproutes"
                | "/apis/gateway.networking.k8s.io/v1/namespaces/shop/referencegrants" => {
                    (200, list)
                }
                path if path.contains("v1beta1") => (404, status(404)),
                _ => (403, status(403)),
            };
            let body = kube::client::Body::from(body.to_string().into_bytes());
            hyper::Response::builder().status(code).body(body)
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn lists_the_version_of_a_kind_that_is_served_and_names_what_is_forbidden() {
        let client = namespaced();
        let kinds = [Kind::HttpRoute, Kind::Service, Kind::Grant];
        let objects = fetch(&client, Some("shop"), kinds).await.unwrap();
        let found: Vec<&str> = objects
            .iter()
            .filter_map(|one| one["kind"].as_str())
            .collect();
        assert_eq!(found, ["HTTPRoute", "Service", "ReferenceGrant"]);
        assert_eq!(objects[2]["apiVersion"], "gateway.networking.k8s.io/v1");
        let error = fetch(&client, None, kinds).await.unwrap_err();
        assert!(error.starts_with("forbidden: "), "{error}");
    }

    #[test]
    fn routes_of_gateways_are_not_routes_of_the_mesh() {
        let mut object = route(json!([]));
        object["spec"]["parentRefs"] = json!([{"name": "edge"}]);
        assert_eq!(Route::read(&object), None);
    }
}
