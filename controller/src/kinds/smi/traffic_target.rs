//! TrafficTargets of the Service Mesh Interface (v1alpha3) as AuthorizationPolicies, with the
//! HTTPRouteGroups and TCPRoutes that they refer to. Pure.
//!
//! A TrafficTarget allows calls, and denies all others, as an ALLOW does. A rule that cannot be
//! converted matches nothing, and the TrafficTarget says so. Expressions have to be of a form that
//! a path or header condition has; the condition matches no more than they do.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::kinds::authorization::spec::Selector;
use crate::kinds::authorization::{AuthorizationPolicy, Direction, INVALID, Mode, Target, parse};
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::fields::{NULL, read};
use crate::object::rejection::shortened;
use crate::object::{Checked, Key, Kind, Meta, Rejection};

/// Before the name of a TrafficTarget among policies. No object has a slash in its name.
const PREFIX: &str = "TrafficTarget/";
/// Conditions on requests of a rule.
const MAX_REQUESTS: usize = 16;
const ELEMENT: &str = "{*}";

/// A TrafficTarget. Without a content, it denies the calls of its namespace.
pub type TrafficTarget = Checked<Box<TargetSpec>>;

/// A TCPRoute of SMI: ports. `None`: all ports.
pub type TcpGroup = Checked<Vec<u16>>;

/// A match of an HTTPRouteGroup: its name, and the condition on requests.
pub type Condition = (String, Result<Value, String>);

/// The fields of a TrafficTarget.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TargetSpec {
    destination: Subject,
    #[serde(default)]
    sources: Vec<Subject>,
    #[serde(default)]
    rules: Vec<Rule>,
    /// The trust domain of the service accounts.
    #[serde(skip)]
    trust_domain: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Subject {
    kind: String,
    name: String,
    namespace: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Rule {
    kind: String,
    name: String,
    /// The names of matches of an HTTPRouteGroup. Empty: all.
    #[serde(default)]
    matches: Vec<String>,
}

/// The fields of a TCPRoute.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct TcpSpec {
    matches: TcpMatch,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TcpMatch {
    #[serde(rename = "name")]
    _name: Box<RawValue>,
    ports: Vec<u16>,
}

/// The route groups to which rules refer.
pub trait Groups {
    /// The conditions of an HTTPRouteGroup. `None`: it does not exist.
    fn requests(&self, key: &Key) -> Option<Result<&[Condition], &Rejection>>;

    /// A TCPRoute.
    fn ports(&self, key: &Key) -> Option<&TcpGroup>;
}

/// The key of a TrafficTarget among policies.
pub fn policy_key(key: &Key) -> Key {
    Key::new(&key.namespace, &format!("{PREFIX}{}", key.name))
}

/// The kind and the key of the object of a policy.
pub fn id(policy: &Key) -> (Kind, Key) {
    match policy.name.strip_prefix(PREFIX) {
        Some(name) => (Kind::TrafficTarget, Key::new(&policy.namespace, name)),
        None => (Kind::Authorization, policy.clone()),
    }
}

/// Parses a TrafficTarget.
pub fn target(meta: Meta, spec: &str, trust_domain: &str) -> TrafficTarget {
    let spec = spec_of(spec).map(|spec: TargetSpec| {
        let trust_domain = trust_domain.to_owned();
        Box::new(TargetSpec {
            trust_domain,
            ..spec
        })
    });
    TrafficTarget::new(meta, vec![], spec)
}

/// Parses a TCPRoute.
pub fn tcp(meta: Meta, spec: &str) -> TcpGroup {
    let ports = spec_of(spec).map(|spec: TcpSpec| spec.matches.ports);
    TcpGroup::new(meta, vec![], ports)
}

fn spec_of<T: DeserializeOwned>(spec: &str) -> Result<T, Rejection> {
    read(spec, "spec").map_err(|rejection| invalid(&rejection.message))
}

/// Denies the calls of a target.
fn denying(meta: Meta, target: Target, rejection: &Rejection) -> AuthorizationPolicy {
    let parent = parse::reference(&target);
    let effect = Err((rejection.clone(), Mode::Enforce));
    let (targets, directions) = ([target].into(), &[Direction::Inbound]);
    AuthorizationPolicy::with(meta, vec![parent], targets, directions, effect)
}

fn invalid(message: &str) -> Rejection {
    Rejection::new(INVALID, shortened(message))
}

impl TrafficTarget {
    /// The route groups to which its rules refer.
    pub fn references(&self) -> impl Iterator<Item = (Kind, Key)> {
        let rules = self.content.iter().flat_map(|spec| &spec.rules);
        rules
            .filter_map(|rule| Some((kind(&rule.kind)?, Key::new(&self.key.namespace, &rule.name))))
    }

    /// The policy.
    pub fn policy(&self, groups: &impl Groups) -> AuthorizationPolicy {
        let meta = Meta {
            kind: self.kind,
            key: policy_key(&self.key),
            created: self.created,
            uid: self.uid.clone(),
            generation: self.generation,
            bytes: self.bytes,
            dropped: self.dropped.clone(),
        };
        let spec = match &self.content {
            Ok(spec) => spec,
            Err(rejection) => return denying(meta, Target::Pods(Selector::default()), rejection),
        };
        let (own, to) = (&*self.key.namespace, &spec.destination);
        let is_own = to.namespace.as_deref().is_none_or(|name| name == own);
        if to.kind != "ServiceAccount" || !is_own {
            let problem = "spec.destination: expected a ServiceAccount of the own namespace";
            // No pod runs under it.
            return denying(
                meta,
                Target::ServiceAccount(String::new()),
                &invalid(problem),
            );
        }
        let mut problems = Vec::new();
        let rules = self.converted(spec, groups, &mut problems);
        let target = json!({"kind": "ServiceAccount", "name": to.name});
        let converted = json!({"targetRefs": [target], "action": "ALLOW", "rules": rules});
        let mut policy = parse::policy(meta, &converted.to_string(), NULL, &spec.trust_domain);
        if policy.invalid.is_none() && !problems.is_empty() {
            let message = shortened(&format!("{}: nothing matches", problems.join("; ")));
            policy.invalid = Some(Rejection {
                is_partial: true,
                ..Rejection::new(UNSUPPORTED_VALUE, message)
            });
        }
        policy
    }

    /// The rules of the policy.
    fn converted(
        &self,
        spec: &TargetSpec,
        groups: &impl Groups,
        problems: &mut Vec<String>,
    ) -> Vec<Value> {
        let is_account = |one: &&Subject| one.kind == "ServiceAccount";
        let (accounts, others): (Vec<_>, Vec<_>) = spec.sources.iter().partition(is_account);
        let sources = accounts.iter().map(|one| {
            let namespace = one.namespace.as_deref().unwrap_or(&self.key.namespace);
            json!({"type": "ServiceAccount",
                "serviceAccount": {"namespace": namespace, "name": one.name}})
        });
        let sources: Value = sources.collect();
        let unknown = others.iter();
        problems.extend(unknown.map(|one| format!("spec.sources: kind {:?}", one.kind)));
        let mut rules = Vec::new();
        for rule in &spec.rules {
            match self.rule(rule, groups, problems) {
                Ok(conditions) => rules.extend(conditions),
                Err(problem) => problems.push(format!("{} {}: {problem}", rule.kind, rule.name)),
            }
        }
        if spec.rules.is_empty() {
            rules.push(json!({}));
        }
        rules
            .iter_mut()
            .for_each(|rule| rule["sources"] = sources.clone());
        rules
    }

    /// The rules of a reference, without sources.
    fn rule(
        &self,
        rule: &Rule,
        groups: &impl Groups,
        problems: &mut Vec<String>,
    ) -> Result<Vec<Value>, String> {
        const MISSING: &str = "it does not exist";
        let key = Key::new(&self.key.namespace, &rule.name);
        match kind(&rule.kind) {
            Some(Kind::TcpGroup) => {
                let ports = groups.ports(&key).ok_or(MISSING)?;
                let ports = ports.content.as_ref().map_err(|one| one.message.clone())?;
                Ok(vec![match ports[..] {
                    [] => json!({}),
                    _ => json!({"networkAttributes": {"ports": ports}}),
                }])
            }
            Some(_) => {
                let requests = groups.requests(&key).ok_or(MISSING)?;
                let requests = requests.map_err(|one| one.message.clone())?;
                let (named, missing) = selected(requests, &rule.matches);
                let problem = |problem: &String| format!("HTTPRouteGroup {}: {problem}", rule.name);
                problems.extend(missing.iter().map(problem));
                let failed = named
                    .iter()
                    .filter_map(|(_, condition)| condition.as_ref().err());
                problems.extend(failed.map(problem));
                let valid = named
                    .iter()
                    .filter_map(|(_, condition)| condition.as_ref().ok());
                let valid: Vec<&Value> = valid.collect();
                let rules = valid.chunks(MAX_REQUESTS);
                Ok(rules
                    .map(|requests| json!({"requests": requests}))
                    .collect())
            }
            None => Err("expected the kind HTTPRouteGroup or TCPRoute".to_owned()),
        }
    }
}

/// The conditions with these names, or all, and the names that there are not.
fn selected<'a>(all: &'a [Condition], names: &[String]) -> (Vec<&'a Condition>, Vec<String>) {
    let is_named = |one: &&Condition| names.is_empty() || names.contains(&one.0);
    let missing = names
        .iter()
        .filter(|name| !all.iter().any(|one| one.0 == **name));
    let missing = missing.map(|name| format!("no match {name:?}"));
    (all.iter().filter(is_named).collect(), missing.collect())
}

/// The kind that a rule refers to.
fn kind(name: &str) -> Option<Kind> {
    [Kind::RouteGroup, Kind::TcpGroup]
        .into_iter()
        .find(|kind| kind.name() == name)
}

/// The condition on requests of a match of an HTTPRouteGroup.
pub fn condition(
    path: Option<&str>,
    methods: &[String],
    headers: &BTreeMap<String, String>,
) -> Result<Value, String> {
    let mut condition = json!({});
    if !methods.is_empty() && !methods.iter().any(|method| method == "*") {
        condition["methods"] = json!(methods);
    }
    let is_everything = path.is_none() && headers.is_empty() && condition == json!({});
    if let Some(path) = path.or(is_everything.then_some("/")) {
        let converted = path_condition(path);
        let converted = converted.ok_or_else(|| unsupported("pathRegex", path))?;
        condition["paths"] = json!([converted]);
    }
    let headers = headers.iter().map(|(name, value)| {
        let condition = header_condition(name, value);
        condition.ok_or_else(|| unsupported(name, value))
    });
    let headers = headers.collect::<Result<Vec<Value>, String>>()?;
    if !headers.is_empty() {
        condition["headers"] = headers.into();
    }
    Ok(condition)
}

fn unsupported(field: &str, value: &str) -> String {
    shortened(&format!(
        "{field} {value:?}: this expression is not supported"
    ))
}

/// The condition for an expression for the start of a path.
fn path_condition(regex: &str) -> Option<Value> {
    let typed = |kind: &str, value: &str| Some(json!({"type": kind, "value": value}));
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let regex = regex.replace("[^/]+", ELEMENT).replace("[^/]*", ELEMENT);
    let (regex, is_complete) = match regex.strip_suffix('$') {
        Some(regex) => (regex, true),
        None => (&*regex, false),
    };
    if ["", "/", ".*", "/.*"].contains(&regex) && !(is_complete && regex.len() < 2) {
        return typed("PathPrefix", "/");
    }
    let rest = regex
        .strip_suffix("/.*")
        .or_else(|| regex.strip_suffix("/.+"));
    let elements = rest.unwrap_or(regex).strip_prefix('/')?.split('/');
    let elements = elements.map(|element| match element {
        ELEMENT => Some(ELEMENT.to_owned()),
        regex => literal(regex),
    });
    let elements = elements.collect::<Option<Vec<String>>>()?;
    let is_template = elements.iter().any(|element| element == ELEMENT);
    let path = format!("/{}", elements.join("/"));
    match (rest.is_some(), is_complete, is_template) {
        (true, ..) => typed("Template", &format!("{path}/{{*}}/{{**}}")),
        (_, true, false) => typed("Exact", &path),
        (_, true, true) => typed("Template", &path),
        (_, false, false) => typed("PathPrefix", &path),
        (_, false, true) => typed("Template", &format!("{path}/{{**}}")),
    }
}

/// The condition for an expression for a whole value.
fn header_condition(name: &str, regex: &str) -> Option<Value> {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let regex = regex.strip_suffix('$').unwrap_or(regex);
    let typed = |kind: &str, value: &str| {
        Some(json!({"name": name, "type": kind, "value": literal(value)?}))
    };
    match (regex.strip_prefix(".*"), regex.strip_suffix(".*")) {
        (Some(""), _) => Some(json!({"name": name, "type": "Present"})),
        (Some(suffix), _) => typed("Suffix", suffix),
        (_, Some(prefix)) => typed("Prefix", prefix),
        _ => typed("Exact", regex),
    }
}

/// The text that an expression without operators matches. A dot stands for itself.
fn literal(regex: &str) -> Option<String> {
    let (mut text, mut characters) = (String::new(), regex.chars());
    while let Some(next) = characters.next() {
        text.push(match next {
            '\\' => characters.next().filter(char::is_ascii_punctuation)?,
            '*' | '+' | '?' | '(' | ')' | '[' | ']' | '{' | '}' | '|' | '^' | '$' => return None,
            next => next,
        });
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1 as proto;

    use super::*;
    use crate::catalog::{self, Change};
    use crate::index::locality::Location;
    use crate::index::state::TargetKind;
    use crate::index::tests::pod;
    use crate::index::{Index, Resource};
    use crate::kinds::Object;

    const OBJECTS: &str = r#"
{apiVersion: access.smi-spec.io/v1alpha3, kind: TrafficTarget, metadata: {name: t, namespace: shop},
 spec: {destination: {kind: ServiceAccount, name: default}, sources: [
  {kind: ServiceAccount, name: web, namespace: bank}], rules: [
  {kind: HTTPRouteGroup, name: routes, matches: [metrics, odd]}, {kind: TCPRoute, name: db}]}}
---
{apiVersion: specs.smi-spec.io/v1alpha4, kind: HTTPRouteGroup, metadata: {name: routes, namespace: shop},
 spec: {matches: [{name: metrics, pathRegex: "/metrics$", methods: [GET]},
  {name: odd, pathRegex: "/(a|b)"}, {name: others, methods: ["*"]}]}}
---
{apiVersion: specs.smi-spec.io/v1alpha4, kind: TCPRoute, metadata: {name: db, namespace: shop},
 spec: {matches: {name: db, ports: [5432]}}}
"#;

    /// Pod `shop/a`, which runs under the account `default`, and these objects.
    fn index(text: &str) -> Index {
        let mut index = Index::of_mesh("service-mesh");
        let mut pod = pod("a", &[]);
        pod.identity = Some("spiffe://cluster.local/ns/shop/sa/default".into());
        let objects = catalog::parse(text, "cluster.local").unwrap().objects;
        for object in [Object::Pod(pod)].into_iter().chain(objects) {
            index.apply(Change::Apply(object));
        }
        index
    }

    fn policies(index: &Index) -> Vec<proto::AuthorizationPolicy> {
        let own = Resource::Workload(Key::new("shop", "a"), "".into());
        let state = index.resolve(&own, &Location::default()).1;
        let TargetKind::Workload(workload) = state.target.unwrap().kind else {
            panic!("a pod")
        };
        let message = workload.authorization.message().unwrap_or_default();
        message.policies
    }

    /// The rules as text: ports and conditions.
    fn rules(index: &Index) -> Vec<String> {
        let mut policies = policies(index);
        assert_eq!(policies.len(), 1);
        let policy = policies.remove(0);
        assert_eq!(policy.name, "TrafficTarget shop/t");
        let rules = policy.rules.iter().map(|rule| {
            assert_eq!(rule.sources.as_ref().unwrap().sources.len(), 1);
            let requests = rule.requests.iter().map(|one| {
                let paths = one
                    .paths
                    .iter()
                    .map(|path| format!("{:?}", path.kind.as_ref().unwrap()));
                format!("{} {}", one.methods.join(","), paths.collect::<String>())
            });
            format!("{:?} {}", rule.ports, requests.collect::<String>())
        });
        rules.collect()
    }

    fn conditions(index: &Index) -> Vec<String> {
        let id = (Kind::TrafficTarget, Key::new("shop", "t"));
        let status = index.status(&id).unwrap().unwrap();
        assert_eq!(status.kind, Kind::TrafficTarget);
        let conditions = status
            .parents
            .into_iter()
            .flat_map(|parent| parent.conditions);
        let problems = conditions.filter(|one| one.is_problem());
        problems
            .map(|one| format!("{}: {}", one.kind, one.message))
            .collect()
    }

    #[test]
    fn traffic_target_is_an_allow_policy_of_a_service_account() {
        let mut index = index(OBJECTS);
        let expected = [r#"[] GET Exact("/metrics")"#, "[5432] "];
        assert_eq!(rules(&index), expected);
        let problem = "PartiallyInvalid: HTTPRouteGroup routes: pathRegex \"/(a|b)\": this expression \
                       is not supported: nothing matches";
        assert_eq!(conditions(&index), [problem]);
        let mut delete = |kind, name: &str| {
            let change = Change::Delete(kind, Key::new("shop", name));
            index.apply(change);
            (rules(&index), conditions(&index))
        };
        let (left, problems) = delete(Kind::TcpGroup, "db");
        assert_eq!(left, expected[..1]);
        assert!(
            problems[0].contains("TCPRoute db: it does not exist"),
            "{problems:?}"
        );
        let (left, _) = delete(Kind::RouteGroup, "routes");
        assert_eq!(left, [""; 0], "it allows nothing");
        let change = Change::Delete(Kind::TrafficTarget, Key::new("shop", "t"));
        index.apply(change);
        assert_eq!(policies(&index), []);
    }

    #[test]
    fn traffic_target_of_another_namespace_concerns_no_pod_and_without_rules_all_calls_match() {
        let other = OBJECTS.replace("name: default}", "name: default, namespace: bank}");
        let other = index(&other);
        assert_eq!(policies(&other), []);
        assert!(conditions(&other)[0].contains("of the own namespace"));
        let target = |namespace: &str| {
            format!(
                "{{apiVersion: access.smi-spec.io/v1alpha3, kind: TrafficTarget, metadata: {{name: t, \
                 namespace: {namespace}}}, spec: {{destination: {{kind: ServiceAccount, name: \
                 default}}, sources: [{{kind: ServiceAccount, name: web}}]}}}}"
            )
        };
        assert_eq!(rules(&index(&target("shop"))), ["[] "]);
        assert_eq!(
            policies(&index(&target("service-mesh"))),
            [],
            "not of the whole mesh"
        );
    }

    #[test]
    fn expressions_are_converted_to_conditions_that_match_no_more() {
        let path = |regex: &str| {
            let condition = condition(Some(regex), &[], &BTreeMap::new()).ok()?;
            let path = &condition["paths"][0];
            Some(format!(
                "{} {}",
                path["type"].as_str()?,
                path["value"].as_str()?
            ))
        };
        for (regex, expected) in [
            (".*", "PathPrefix /"),
            ("/api", "PathPrefix /api"),
            ("^/v1\\.0/api$", "Exact /v1.0/api"),
            ("/api/.*", "Template /api/{*}/{**}"),
            ("/users/[^/]+/orders$", "Template /users/{*}/orders"),
            ("/users/[^/]+", "Template /users/{*}/{**}"),
        ] {
            assert_eq!(path(regex).as_deref(), Some(expected), "{regex}");
        }
        for regex in [
            "api", "/(a|b)", "/a+", "/a.*b", "/a/", "/[ab]", "/a|/b", "$", "/\\d",
        ] {
            assert_eq!(path(regex), None, "{regex}");
        }
        let header = |regex: &str| {
            let headers = [("x-a".to_owned(), regex.to_owned())].into();
            let condition = condition(None, &[], &headers).ok()?;
            let header = &condition["headers"][0];
            let value = header["value"].as_str().unwrap_or_default();
            Some(format!("{} {value}", header["type"].as_str()?))
        };
        for (regex, expected) in [
            ("yes", Some("Exact yes")),
            (".*", Some("Present ")),
            ("^curl.*$", Some("Prefix curl")),
            (".*bot", Some("Suffix bot")),
            (".*bot.*", None),
            ("a|b", None),
        ] {
            assert_eq!(header(regex).as_deref(), expected, "{regex}");
        }
        let everything = condition(None, &["*".to_owned()], &BTreeMap::new()).unwrap();
        let expected = json!({"paths": [{"type": "PathPrefix", "value": "/"}]});
        assert_eq!(everything, expected, "of requests only");
    }
}
