//! `mesh authz generate`: writes AuthorizationPolicies that allow the calls that proxies saw. Changes
//! nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use diy_mesh_model::identity::Identity;
use diy_mesh_proto::{
    authorization::{MAX_RULES, REVISION, check, edge::OTHER_METHOD},
    mesh::v1::{
        AuthorizationPolicy, AuthorizationRule, AuthorizedPath, Edge, RequestMatch,
        authorization_policy::Action, authorized_path::Kind, edge::Path, get_edges_response::Group,
    },
};
use serde_json::{Value, json};

use crate::names::unique;
use crate::terminal;
use crate::{
    authorization::Outcome,
    controller,
    edges::{self, Observed},
    files, yaml,
};

/// The bounds of an AuthorizationPolicy.
const MAX_SOURCES: usize = 64;
const MAX_REQUESTS: usize = 16;
const MAX_PATHS: usize = 32;
const MAX_LABELS: usize = 32;

/// The arguments of `mesh authz generate`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh authz generate -n shop >policies.yaml   policies under audit for the pods of a namespace\n  \
    mesh plan -f policies.yaml                   what they would have denied"
)]
pub struct Arguments {
    /// Mode of the policies
    #[arg(long, value_enum, default_value_t)]
    mode: Mode,
    /// File with the calls, the JSON of GetEdgesResponse, in place of a controller
    #[arg(long, value_name = "FILE")]
    edges: Option<PathBuf>,
    #[command(flatten)]
    controller: controller::Arguments,
}

/// Whether the policies refuse calls.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(in crate::commands) enum Mode {
    /// They refuse nothing, and what they would refuse is counted
    #[default]
    Audit,
    /// They refuse calls
    Enforce,
}

/// Reads the calls and prints policies.
pub async fn run(arguments: &Arguments) -> Result<Outcome> {
    let Arguments {
        edges, controller, ..
    } = arguments;
    let of = controller.cluster.namespace.as_deref().unwrap_or_default();
    let observed = Observed::read(controller, edges.as_ref(), of).await?;
    let mut notes = Vec::new();
    let policies = policies(&observed, arguments.mode, &mut notes);
    terminal::print(&(comments(&policies) + &yaml::write(&policies)))?;
    files::print(&notes);
    Ok(Outcome::Allowed)
}

/// A comment for each policy that allows clients without an identity.
fn comments(policies: &[Value]) -> String {
    let is_open = |policy: &&Value| {
        let mut rules = policy["spec"]["rules"].as_array().into_iter().flatten();
        rules.any(|rule| {
            let mut sources = rule["sources"].as_array().into_iter().flatten();
            sources.any(|source| source["type"] == "Unauthenticated" || source["type"] == "IPBlock")
        })
    };
    let comments = policies.iter().filter(is_open).map(|policy| {
        let [namespace, name] = ["namespace", "name"].map(|field| &policy["metadata"][field]);
        let [namespace, name] = [namespace, name].map(|text| text.as_str().unwrap_or_default());
        format!(
            "# {namespace}/{name} allows clients without an identity, since such calls were seen: remove\n\
             # Unauthenticated and IPBlock, or restrict them, once all clients are meshed.\n"
        )
    });
    comments.collect()
}

/// The policies of all groups. Notes about missing calls are added to `notes`.
fn policies(observed: &Observed, mode: Mode, notes: &mut Vec<String>) -> Vec<Value> {
    let fields = json!({"mode": format!("{mode:?}")});
    allowing(observed, "observed", &fields, notes, |group, notes| {
        let rules = rules(group, &observed.trust_domain, notes);
        Some(rules).filter(|rules| !rules.is_empty())
    })
}

/// ALLOW policies with the `rules` of each group, a prefix of their names, and further fields. Rules
/// that are an empty list allow nothing; without a list, there is no policy.
pub(in crate::commands) fn allowing(
    observed: &Observed,
    prefix: &str,
    fields: &Value,
    notes: &mut Vec<String>,
    rules: impl Fn(&Group, &mut Vec<String>) -> Option<Vec<Value>>,
) -> Vec<Value> {
    let (mut all, mut names) = (Vec::new(), BTreeSet::new());
    for group in &observed.groups {
        if group.incomplete {
            notes.push(format!(
                "{}: there were more calls than are kept",
                edges::title(group)
            ));
        }
        let Some(rules) = rules(group, notes) else {
            continue;
        };
        let mut parts: Vec<&[Value]> = rules.chunks(MAX_RULES).collect();
        if parts.is_empty() {
            parts.push(&[]);
        }
        for rules in parts {
            let name = unique(&name(prefix, group), &group.namespace, &mut names);
            let mut spec = fields.clone();
            spec["action"] = json!("ALLOW");
            spec["rules"] = json!(rules);
            spec["targetRefs"] = json!([target(group)]);
            all.push(json!({
                "apiVersion": "diy-service-mesh.dev/v1alpha1",
                "kind": "AuthorizationPolicy",
                "metadata": {"name": name, "namespace": group.namespace},
                "spec": spec,
            }));
        }
    }
    all
}

fn target(group: &Group) -> Value {
    if (1..=MAX_LABELS).contains(&group.labels.len()) {
        json!({"group": "", "kind": "Pod", "selector": {"matchLabels": group.labels}})
    } else {
        json!({"group": "", "kind": "ServiceAccount", "name": group.service_account})
    }
}

fn name(prefix: &str, group: &Group) -> String {
    let labels = ["app.kubernetes.io/name", "app"];
    let name = labels.iter().find_map(|label| group.labels.get(*label));
    let name = name.unwrap_or(&group.service_account).to_ascii_lowercase();
    let name: String = name
        .chars()
        .map(|one| {
            if one.is_ascii_alphanumeric() {
                one
            } else {
                '-'
            }
        })
        .collect();
    format!("{prefix}-{}", name.trim_matches('-'))
}

/// The requests of a caller at a port: paths, each with the methods.
type Requests = BTreeMap<String, BTreeSet<String>>;

/// A rule for each port, and for the callers that asked for the same.
fn rules(group: &Group, trust_domain: &str, notes: &mut Vec<String>) -> Vec<Value> {
    let edges = edges::called(group);
    let is_request = |edge: &&Edge| !edge.method.is_empty();
    let http: BTreeSet<u32> = edges
        .clone()
        .filter(is_request)
        .map(|edge| edge.port)
        .collect();
    let mut calls: BTreeMap<(u32, &str), Requests> = BTreeMap::new();
    let mut rules: BTreeMap<(u32, String), (Value, Vec<Value>)> = BTreeMap::new();
    let mut add = |port, requests: Value, source| {
        let rule = rules.entry((port, requests.to_string()));
        rule.or_insert((requests, vec![])).1.push(source);
    };
    for edge in edges {
        let reason = match (item(edge), &*edge.method) {
            (_, "") if http.contains(&edge.port) => {
                ": the port carries HTTP, too, and a rule for connections allows all requests"
            }
            (_, "") if edge.caller.is_empty() && edge.block.is_empty() => {
                ": a rule without their addresses, which are not recorded, allows all clients"
            }
            (_, "") => {
                add(edge.port, Value::Null, source(edge, trust_domain));
                continue;
            }
            (Some(item), method) if method != OTHER_METHOD => {
                let requests = calls.entry((edge.port, &edge.caller)).or_default();
                requests.entry(item).or_default().insert(method.to_owned());
                continue;
            }
            _ => "",
        };
        notes.push(format!(
            "{}: no rule for {}{reason}",
            edges::title(group),
            edges::describe(edge)
        ));
    }
    for ((port, caller), requests) in calls {
        let of = Edge {
            caller: caller.to_owned(),
            ..Edge::default()
        };
        for requests in conditions(&requests) {
            add(port, requests, source(&of, trust_domain));
        }
    }
    let rules = rules
        .into_iter()
        .flat_map(|((port, _), (requests, sources))| {
            let rule = |sources: &[Value]| {
                let mut rule = json!({"sources": sources, "networkAttributes": {"ports": [port]}});
                if !requests.is_null() {
                    rule["requests"] = requests.clone();
                }
                rule
            };
            sources.chunks(MAX_SOURCES).map(rule).collect::<Vec<_>>()
        });
    rules.collect()
}

/// The client of an edge: its identity, or the block of its addresses.
fn source(edge: &Edge, own: &str) -> Value {
    let identity: Option<Identity> = edge.caller.parse().ok();
    match identity {
        None if edge.block.is_empty() => json!({"type": "Unauthenticated"}),
        None => json!({"type": "IPBlock", "ipBlock": edge.block}),
        Some(identity) if identity.trust_domain() == own => {
            let (namespace, name) = (identity.namespace(), identity.service_account());
            let account = json!({"namespace": namespace, "name": name});
            json!({"type": "ServiceAccount", "serviceAccount": account})
        }
        Some(identity) => json!({"type": "SPIFFE", "spiffe": identity.as_str()}),
    }
}

/// The entry of `paths` for an edge, as JSON.
fn item(edge: &Edge) -> Option<String> {
    let (kind, path) = match edge.path.as_ref()? {
        Path::Grpc(path) => ("Exact", Kind::Exact(path.clone())),
        Path::Segment(path) if path == "/" => ("Exact", Kind::Exact(path.clone())),
        Path::Segment(path) => ("PathPrefix", Kind::Prefix(path.clone())),
        Path::Pattern(pattern) => match pattern.kind.clone()? {
            path @ Kind::Exact(_) => ("Exact", path),
            path @ Kind::Prefix(_) => ("PathPrefix", path),
            path @ Kind::Suffix(_) => ("Suffix", path),
            path @ Kind::Template(_) => ("Template", path),
        },
    };
    if !is_accepted(&path) {
        return None;
    }
    let (Kind::Exact(value) | Kind::Prefix(value) | Kind::Suffix(value) | Kind::Template(value)) =
        path;
    Some(json!({"type": kind, "value": value}).to_string())
}

/// Whether a policy may have the path.
fn is_accepted(path: &Kind) -> bool {
    let path = AuthorizedPath {
        kind: Some(path.clone()),
    };
    let request = RequestMatch {
        paths: vec![path],
        ..RequestMatch::default()
    };
    let rule = AuthorizationRule {
        revision: REVISION,
        requests: vec![request],
        ..AuthorizationRule::default()
    };
    let policy = AuthorizationPolicy {
        action: Action::Allow.into(),
        rules: vec![rule],
        ..AuthorizationPolicy::default()
    };
    check(&policy).is_ok()
}

/// The `requests` of one or more rules.
fn conditions(requests: &Requests) -> Vec<Value> {
    let mut alike: BTreeMap<&BTreeSet<String>, Vec<Value>> = BTreeMap::new();
    for (path, methods) in requests {
        let path = path.parse().expect("it is JSON");
        alike.entry(methods).or_default().push(path);
    }
    let conditions = alike.into_iter().flat_map(|(methods, paths)| {
        let condition = |paths: &[Value]| json!({"methods": methods, "paths": paths});
        paths.chunks(MAX_PATHS).map(condition).collect::<Vec<_>>()
    });
    let conditions: Vec<Value> = conditions.collect();
    conditions
        .chunks(MAX_REQUESTS)
        .map(|requests| json!(requests))
        .collect()
}

#[cfg(test)]
mod tests {
    use diy_mesh_controller::explain;
    use diy_mesh_model::identity::TRUST_DOMAIN;
    use diy_mesh_sandbox::manifest;

    use diy_mesh_proto::mesh::v1::SilentConnection;

    use super::*;
    use crate::plan::{
        plan,
        tests::{edge, group, segment},
    };

    fn observed(edges: Vec<Edge>) -> Observed {
        Observed {
            groups: vec![group(edges)],
            trust_domain: TRUST_DOMAIN.to_owned(),
        }
    }

    /// The policies and the notes. The policies are valid, and deny nothing of what was seen.
    fn generated(observed: &Observed, denied: usize) -> (Vec<Value>, Vec<String>) {
        let mut notes = Vec::new();
        let policies = policies(observed, Mode::Enforce, &mut notes);
        let index = |objects: &[Value]| explain::index(objects, "", TRUST_DOMAIN).0;
        let (mut before, mut after) = (index(&[]), index(&policies));
        assert_eq!(explain::problems_of_authorization(&after), [""; 0]);
        let plan = plan(observed, [&mut before, &mut after], |_| false, 0);
        assert_eq!(plan.effects.len(), denied, "{:?}", plan.effects);
        (policies, notes)
    }

    #[test]
    fn policy_allows_what_was_seen() {
        let grpc = Some(Path::Grpc("/a.Cart/Add".into()));
        let observed = observed(vec![
            edge("web", 8080, "GET", segment("/items")),
            edge("web", 8080, "HEAD", segment("/items")),
            edge("web", 8080, "POST", grpc),
            edge("api", 8080, "GET", segment("/")),
            edge("job", 8080, "GET", segment("/")),
            Edge {
                block: "192.0.2.0/24".to_owned(),
                ..edge("", 9090, "", None)
            },
            edge("db", 9090, "", None),
            Edge {
                destination: "api.example.com:443".to_owned(),
                ..Edge::default()
            },
        ]);
        let (policies, notes) = generated(&observed, 0);
        assert_eq!(notes, [""; 0]);
        let expected = "\
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata:
  name: observed-cart
  namespace: shop
spec:
  action: ALLOW
  mode: Enforce
  rules:
  - networkAttributes:
      ports:
      - 8080
    requests:
    - methods:
      - GET
      - HEAD
      paths:
      - type: PathPrefix
        value: /items
    - methods:
      - POST
      paths:
      - type: Exact
        value: /a.Cart/Add
    sources:
    - serviceAccount:
        name: web
        namespace: shop
      type: ServiceAccount
  - networkAttributes:
      ports:
      - 8080
    requests:
    - methods:
      - GET
      paths:
      - type: Exact
        value: /
    sources:
    - serviceAccount:
        name: api
        namespace: shop
      type: ServiceAccount
    - serviceAccount:
        name: job
        namespace: shop
      type: ServiceAccount
  - networkAttributes:
      ports:
      - 9090
    sources:
    - ipBlock: 192.0.2.0/24
      type: IPBlock
    - serviceAccount:
        name: db
        namespace: shop
      type: ServiceAccount
  targetRefs:
  - group: ''
    kind: Pod
    selector:
      matchLabels:
        app: cart
";
        assert_eq!(serde_yaml_ng::to_string(&policies[0]).unwrap(), expected);
        let comment = comments(&policies);
        assert!(
            comment.starts_with("# shop/observed-cart allows clients"),
            "{comment}"
        );
        assert_eq!(
            manifest::parse(&(comment + &yaml::write(&policies))).unwrap(),
            policies
        );
    }

    #[test]
    fn policy_allows_no_more_than_was_seen() {
        let observed = observed(vec![
            edge("", 8080, "GET", segment("/items")),
            edge("web", 8080, "", None),
            Edge {
                block: "192.0.2.0/24".to_owned(),
                ..edge("", 8080, "", None)
            },
            // An earlier release has reported it.
            edge("", 9090, "", None),
        ]);
        let mut notes = Vec::new();
        let policies = policies(&observed, Mode::Enforce, &mut notes);
        let requests =
            json!([{"methods": ["GET"], "paths": [{"type": "PathPrefix", "value": "/items"}]}]);
        let expected = json!([{"sources": [{"type": "Unauthenticated"}],
            "networkAttributes": {"ports": [8080]}, "requests": requests}]);
        assert_eq!(policies[0]["spec"]["rules"], expected);
        assert_eq!((policies.len(), notes.len()), (1, 3), "{notes:?}");
        let expected = "shop/cart app=cart: no rule for connections from unauthenticated 192.0.2.0/24: the port carries HTTP, too";
        assert!(
            notes.iter().any(|note| note.starts_with(expected)),
            "{notes:?}"
        );
    }

    #[test]
    fn connections_without_a_byte_generate_nothing() {
        let silent = Edge {
            silent: Some(SilentConnection {
                port: 80,
                block: "192.0.2.0/24".to_owned(),
                ..SilentConnection::default()
            }),
            ..Edge::default()
        };
        let mut notes = Vec::new();
        let policies = policies(&observed(vec![silent]), Mode::Audit, &mut notes);
        assert_eq!((policies, notes), (Vec::new(), Vec::new()));
    }

    #[test]
    fn names_that_are_booleans_in_yaml_1_1_are_text() {
        let observed = observed(vec![edge("on", 8080, "GET", segment("/items"))]);
        let (policies, _) = generated(&observed, 0);
        let text = yaml::write(&policies);
        assert!(text.contains("name: \"on\"\n"), "{text}");
        assert_eq!(manifest::parse(&text).unwrap(), policies);
    }

    #[test]
    fn bounds_of_policies_hold() {
        let callers = (0..70).map(|at| edge(&format!("c{at}"), 8080, "GET", segment("/a")));
        let paths = (0..64).map(|at| edge("many", 8080, "GET", segment(&format!("/p{at}"))));
        let ports = (1..150).map(|port| edge("scan", port, "GET", segment("/a")));
        let (policies, notes) =
            generated(&observed(callers.chain(paths).chain(ports).collect()), 0);
        let names: Vec<&Value> = policies
            .iter()
            .map(|policy| &policy["metadata"]["name"])
            .collect();
        assert_eq!(names, ["observed-cart", "observed-cart-2"]);
        assert_eq!(notes, [""; 0]);
    }

    #[test]
    fn what_no_rule_can_say_is_told() {
        let mut observed = observed(vec![
            edge("web", 8080, "GET", None),
            edge("web", 8080, "OTHER", segment("/items")),
            edge("web", 8080, "OPTIONS", segment("*")),
        ]);
        observed.groups[0].incomplete = true;
        let (policies, notes) = generated(&observed, 0);
        assert_eq!(policies, [Value::Null; 0]);
        assert_eq!(notes.len(), 4, "{notes:?}");
        let expected = "shop/cart app=cart: no rule for GET (path not recorded) from shop/web";
        assert!(notes.contains(&expected.to_owned()), "{notes:?}");
    }
}
