//! TrafficSplits and HTTPRouteGroups of the Service Mesh Interface (v1alpha4), as routes. Pure.
//!
//! A TrafficSplit has no ports: a backend takes part at the ports that it has in common with the
//! Service. Requests outside of its groups stay with the Service.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::traffic_target::{Condition, condition};
use crate::kinds::route::matches::MatchSpec;
use crate::kinds::route::model::{Match, ParsedRule, Reference, Route};
use crate::kinds::route::parse::{MAX_ITEMS, MAX_MATCHES_OF_ROUTE, MAX_WEIGHT, check_matches};
use crate::kinds::route::spec::{HttpMatch, ValueMatch};
use crate::object::condition::BACKEND_NOT_FOUND;
use crate::object::fields::read;
use crate::object::rejection::{bounded, refuse, unsupported};
use crate::object::{Checked, Key, Meta, Rejection, TargetReference};

const REGEX: &str = "RegularExpression";
/// Lists of backends, groups and matches.
const MAX_ENTRIES: usize = 64;
/// At least the length of the message for an entry that its object does not contain.
const ENTRY_BYTES: usize = 256;

/// A TrafficSplit. Its parent is the Service.
pub type Split = Checked<SplitRule>;

/// The rule of a TrafficSplit.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitRule {
    /// The groups whose requests are split. Empty: all requests.
    pub groups: Vec<Key>,
    /// The rule without the matches of these groups.
    rule: Arc<ParsedRule>,
}

/// An HTTPRouteGroup: conditions on requests.
pub type RouteGroup = Checked<Group>;

/// The matches of an HTTPRouteGroup.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// For routes.
    matches: Vec<Arc<Match>>,
    /// For AuthorizationPolicies.
    pub conditions: Vec<Condition>,
}

/// The fields of a TrafficSplit.
#[derive(Deserialize)]
pub struct SplitSpec {
    service: String,
    #[serde(default)]
    backends: Vec<BackendSpec>,
    #[serde(default)]
    matches: Vec<GroupReference>,
}

#[derive(Deserialize)]
struct BackendSpec {
    service: String,
    weight: Box<RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GroupReference {
    #[serde(default, rename = "apiGroup")]
    _api_group: Box<RawValue>,
    #[serde(default)]
    kind: String,
    name: String,
}

/// The fields of an HTTPRouteGroup.
#[derive(Deserialize)]
pub struct GroupSpec {
    #[serde(default)]
    matches: Vec<GroupMatch>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GroupMatch {
    #[serde(default)]
    name: String,
    path_regex: Option<String>,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// Parses a TrafficSplit. An error: its Service is unknown.
pub fn split(meta: Meta, spec: &str) -> Result<Split, String> {
    let parsed: SplitSpec = read(spec, "spec").map_err(|one| one.message)?;
    let groups = parsed.matches.iter();
    let groups = groups.map(|one| Key::new(&meta.key.namespace, &one.name));
    let rule = rule(&meta, &parsed).map(|rule| SplitRule {
        groups: groups.collect(),
        rule: Arc::new(rule),
    });
    let parent = TargetReference::service(&parsed.service);
    let bytes = 2 * meta.bytes + (2 + parsed.backends.len()) * ENTRY_BYTES;
    Ok(Split::new(Meta { bytes, ..meta }, vec![parent], rule))
}

fn rule(meta: &Meta, spec: &SplitSpec) -> Result<ParsedRule, Rejection> {
    bounded("spec.backends", &spec.backends, MAX_ENTRIES)?;
    bounded("spec.matches", &spec.matches, MAX_ITEMS)?;
    if let Some(other) = spec.matches.iter().find(|one| one.kind != "HTTPRouteGroup") {
        let field = "spec.matches.kind";
        return Err(unsupported(field, &other.kind, "HTTPRouteGroup"));
    }
    let mut backends = Vec::new();
    for (position, backend) in spec.backends.iter().enumerate() {
        let field = format!("spec.backends[{position}]");
        let weight = serde_json::from_str::<u32>(backend.weight.get()).ok();
        let Some(weight) = weight.filter(|weight| *weight <= MAX_WEIGHT) else {
            let expected = format!("an integer from 0 to {MAX_WEIGHT}");
            return refuse(&field, "weight", &backend.weight, &expected);
        };
        backends.push((to(&meta.key, &backend.service, &field), weight));
    }
    let name = format!("{} {}", meta.kind, meta.key);
    // After the matches of groups, and before requests that no split concerns.
    let everything = Match {
        rank: Reverse([0, 0, 0, 0, 1]),
        ..Match::default()
    };
    Ok(ParsedRule::new(vec![Arc::new(everything)], name, backends))
}

fn to(split: &Key, service: &str, field: &str) -> Reference {
    Reference::service(Key::new(&split.namespace, service), field.to_owned())
}

impl Split {
    /// The route, with the matches of its groups.
    pub fn route<'a>(&self, group: impl Fn(&Key) -> Option<&'a RouteGroup>) -> Route {
        let mut route = self.and_then(|split| {
            if split.groups.is_empty() {
                Ok(vec![split.rule.clone()])
            } else {
                self.with_groups(split, &group)
            }
        });
        let groups = self.content.iter().flat_map(|split| &split.groups);
        let groups = groups.filter_map(&group);
        route.bytes += groups.map(|group| group.bytes).sum::<usize>();
        route
    }

    fn with_groups<'a>(
        &self,
        split: &SplitRule,
        group: &impl Fn(&Key) -> Option<&'a RouteGroup>,
    ) -> Result<Vec<Arc<ParsedRule>>, Rejection> {
        let mut matches = Vec::new();
        for key in &split.groups {
            let Some(group) = group(key) else {
                let message = format!("spec.matches: the HTTPRouteGroup {key} does not exist");
                return Err(Rejection::new(BACKEND_NOT_FOUND, message));
            };
            matches.extend(group.content.clone()?.matches);
        }
        check_matches("spec.matches", matches.iter())?;
        let split = ParsedRule {
            matches,
            ..(*split.rule).clone()
        };
        let everything = vec![Arc::new(Match::default())];
        let name = format!("{}/unmatched", split.message.name);
        let service = to(&self.key, &self.parents[0].name, "spec.service");
        let mut others = ParsedRule::new(everything, name, vec![(service, 1)]);
        Arc::make_mut(&mut others.message).to_destination = true;
        Ok(vec![Arc::new(split), Arc::new(others)])
    }
}

/// Parses an HTTPRouteGroup.
pub fn group(meta: Meta, spec: &str) -> Result<RouteGroup, String> {
    let parsed: GroupSpec = read(spec, "spec").map_err(|one| one.message)?;
    let matches = group_matches(&meta.key, &parsed);
    let all = matches.iter().flatten();
    let bytes = all.map(|one| format!("{one:?}").len()).sum();
    let condition = |one: &GroupMatch| {
        let path = one.path_regex.as_deref();
        (
            one.name.clone(),
            condition(path, &one.methods, &one.headers),
        )
    };
    let conditions = parsed.matches.iter().map(condition);
    let group = matches.map(|matches| Group {
        matches,
        conditions: conditions.collect(),
    });
    Ok(RouteGroup::new(Meta { bytes, ..meta }, vec![], group))
}

/// The matches of a group. Their number is checked before they are made: each method of a match
/// repeats its expressions.
fn group_matches(group: &Key, spec: &GroupSpec) -> Result<Vec<Arc<Match>>, Rejection> {
    let field = format!("HTTPRouteGroup {group}: spec.matches");
    bounded(&field, &spec.matches, MAX_ENTRIES)?;
    let mut all = Vec::new();
    for (position, one) in spec.matches.iter().enumerate() {
        let at = format!("{field}[{position}]");
        bounded(&format!("{at}.methods"), &one.methods, MAX_ITEMS)?;
        for spec in http_matches(one) {
            all.push(Arc::new(spec.parse(&at)?));
        }
        bounded(&field, &all, MAX_MATCHES_OF_ROUTE)?;
    }
    Ok(all)
}

/// One match for each method.
fn http_matches(one: &GroupMatch) -> Vec<HttpMatch> {
    let every = [String::new()];
    let has_all = one.methods.is_empty() || one.methods.iter().any(|method| method == "*");
    let methods = if has_all { &every[..] } else { &one.methods };
    let value = |name: &str, value: String| ValueMatch {
        kind: Some(REGEX.to_owned()),
        name: name.to_owned(),
        value: Some(value),
    };
    let of_method = |method: &String| {
        let (path, headers) = (one.path_regex.as_ref(), one.headers.iter());
        HttpMatch {
            // The expression is for the start of the path.
            path: path.map(|path| value("", format!("(?:{path}).*"))),
            headers: headers
                .map(|(name, pattern)| value(name, pattern.clone()))
                .collect(),
            query_params: Vec::new(),
            method: Some(method.clone()).filter(|method| !method.is_empty()),
        }
    };
    methods.iter().map(of_method).collect()
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1::RouteRule;
    use serde_json::{Value, json};

    use super::*;
    use crate::index::locality::Location;
    use crate::index::tests::{index, key, service};
    use crate::index::{Index, Resource};
    use crate::kinds::Object;
    use crate::kinds::route::attach::Table;
    use crate::object::Kind;

    fn split(name: &str, spec: Value) -> Object {
        let spec = spec.to_string();
        let meta = Meta::new(Kind::TrafficSplit, key(name), 0, ("", 0), &spec);
        Object::Split(super::split(meta, &spec).unwrap())
    }

    fn group(name: &str, matches: Value) -> Object {
        let spec = json!({"matches": matches}).to_string();
        let meta = Meta::new(Kind::RouteGroup, key(name), 0, ("", 0), &spec);
        Object::RouteGroup(super::group(meta, &spec).unwrap())
    }

    fn services() -> Vec<Object> {
        let all = [
            ("web", "10.96.0.7"),
            ("v1", "10.96.0.8"),
            ("v2", "10.96.0.9"),
        ];
        all.map(|(name, ip)| Object::Service(service(name, &[ip])))
            .into()
    }

    fn routes(index: &Index, port: u16) -> Option<Arc<Table>> {
        let web = Resource::Destination(([10, 96, 0, 7], port).into());
        let target = index.resolve(&web, &Location::default()).1.target;
        target.unwrap().routes
    }

    /// The backends of connections without HTTP, if they do not stay with the Service.
    fn connections(index: &Index) -> Option<Vec<String>> {
        let rule = routes(index, 80)?.tcp.as_ref()?.message();
        // Proxies reject more than backends.
        let only_backends = RouteRule {
            name: rule.name.clone(),
            backends: rule.backends.clone(),
            ..RouteRule::default()
        };
        assert_eq!(rule, only_backends);
        let backends = rule.backends.iter();
        Some(
            backends
                .map(|one| format!("{}={}", one.name, one.weight))
                .collect(),
        )
    }

    /// A line for each match at a port of Service shop/web: the conditions and the backends.
    fn table(index: &Index, port: u16) -> Vec<String> {
        let Some(table) = routes(index, port) else {
            return vec![];
        };
        let matches = table.matches.iter().map(|(rule, one)| {
            let rule = table.rules[*rule as usize].message();
            let backends = rule.backends.iter();
            let backends = backends.map(|one| format!(" {}={}", one.name, one.weight));
            let path = one.path().map(|path| format!("{path:?} "));
            let fields = one
                .message
                .headers
                .iter()
                .map(|field| format!("{} {:?} ", field.name, field.kind.as_ref().unwrap()));
            let fields = fields.collect::<String>();
            let path = path.unwrap_or_default();
            let others = if rule.to_destination { " others" } else { "" };
            format!(
                "{}{path}{fields}->{}{others}",
                one.message.method,
                backends.collect::<String>()
            )
        });
        matches.collect()
    }

    fn problems(index: &Index) -> Vec<String> {
        let all = index.route_statuses();
        let conditions = all.iter().flat_map(|status| &status.parents);
        let conditions = conditions.flat_map(|parent| &parent.conditions);
        let failed = conditions.filter(|condition| !condition.holds);
        failed
            .map(|one| format!("{} {}", one.reason, one.message))
            .collect()
    }

    fn with(objects: impl IntoIterator<Item = Object>) -> Index {
        index(services().into_iter().chain(objects))
    }

    fn backends() -> Value {
        json!([{"service": "v1", "weight": 90}, {"service": "v2", "weight": 10}])
    }

    #[test]
    fn traffic_split_shares_the_requests_at_each_port() {
        let spec = json!({"service": "web", "backends": backends()});
        let index = with([split("canary", spec)]);
        assert_eq!(table(&index, 80), ["-> shop/v1:80=90 shop/v2:80=10"]);
        assert_eq!(table(&index, 9000), ["-> shop/v1:9000=90 shop/v2:9000=10"]);
        assert_eq!(problems(&index), [""; 0]);
    }

    #[test]
    fn connections_without_http_follow_splits_of_all_requests_only() {
        let all = split("all", json!({"service": "web", "backends": backends()}));
        let weights = Some(vec!["shop/v1:80=90".to_owned(), "shop/v2:80=10".to_owned()]);
        assert_eq!(connections(&with([all.clone()])), weights);
        // A group selects requests. The older split comes first.
        let spec = json!({
            "service": "web", "backends": backends(),
            "matches": [{"kind": "HTTPRouteGroup", "name": "insiders"}],
        });
        let matches = json!([{"name": "a", "headers": {"x-insider": "yes"}}]);
        let of_group = [split("ab", spec), group("insiders", matches)];
        let index = with(of_group.clone());
        assert_eq!(table(&index, 80).len(), 2);
        assert_eq!(connections(&index), None);
        assert_eq!(
            connections(&with(of_group.into_iter().chain([all]))),
            weights
        );
    }

    #[test]
    fn backend_without_the_port_gets_no_requests_and_is_reported() {
        let mut v2 = service("v2", &["10.96.0.9"]);
        v2.ports.retain(|port| port.port == 80);
        let spec = json!({"service": "web", "backends": backends()});
        let index = with([split("canary", spec), Object::Service(v2)]);
        assert_eq!(table(&index, 80), ["-> shop/v1:80=90 shop/v2:80=10"]);
        assert_eq!(table(&index, 9000), ["-> shop/v1:9000=90"]);
        let expected = "BackendNotFound spec.backends[1]: the Service shop/v2 has no TCP port 9000";
        assert_eq!(problems(&index), [expected]);
        let missing = json!({"service": "web", "backends": [{"service": "none", "weight": 1}]});
        let index = with([split("canary", missing)]);
        let message = "requests stay with the Service if no backend is left";
        assert_eq!(table(&index, 80), ["-> shop/web:80=1"], "{message}");
    }

    #[test]
    fn requests_that_match_no_group_stay_with_the_service() {
        let spec = json!({
            "service": "web", "backends": [{"service": "v2", "weight": 1}],
            "matches": [{"kind": "HTTPRouteGroup", "name": "insiders"}],
        });
        let mut index = with([split("ab", spec)]);
        let change = |index: &mut Index, object| {
            let change = crate::catalog::Change::Apply(object);
            index.apply(change);
        };
        assert_eq!(table(&index, 80), [""; 0]);
        let expected =
            "BackendNotFound spec.matches: the HTTPRouteGroup shop/insiders does not exist";
        assert_eq!(problems(&index), [expected]);
        let matches = json!([
            {"name": "a", "headers": {"User-Agent": ".*Firefox.*"}},
            {"name": "b", "pathRegex": "/api", "methods": ["GET", "PUT"]},
        ]);
        change(&mut index, group("insiders", matches));
        let expected = [
            "GETRegex(\"(?:/api).*\") -> shop/v2:80=1",
            "PUTRegex(\"(?:/api).*\") -> shop/v2:80=1",
            "Prefix(\"/\") user-agent Regex(\".*Firefox.*\") -> shop/v2:80=1",
            "-> shop/web:80=1 others",
        ];
        assert_eq!(table(&index, 80), expected);
        // A second split, of all requests, comes after the groups of the first.
        let all = json!({"service": "web", "backends": [{"service": "v1", "weight": 1}]});
        change(&mut index, split("z", all));
        assert_eq!(
            table(&index, 80)[3..],
            ["-> shop/v1:80=1", "-> shop/web:80=1 others"]
        );
        change(
            &mut index,
            group("insiders", json!([{"name": "a", "pathRegex": "("}])),
        );
        // The split has no effect, and the other one remains.
        assert_eq!(table(&index, 80), ["-> shop/v1:80=1"]);
        let [problem] = &problems(&index)[..] else {
            panic!("one split is invalid")
        };
        let field = "HTTPRouteGroup shop/insiders: spec.matches[0].path.value";
        assert!(problem.contains(field), "{problem}");
    }

    #[test]
    fn group_with_too_many_matches_is_rejected_before_they_are_made() {
        let group = |matches: &[Value]| {
            let spec = json!({"matches": matches}).to_string();
            let meta = Meta::new(Kind::RouteGroup, key("g"), 0, ("", 0), &spec);
            super::group(meta, &spec).unwrap().content
        };
        let one = |methods: usize| json!({"name": "a", "methods": vec!["GET"; methods]});
        assert_eq!(group(&[one(16)]).map(|all| all.matches.len()), Ok(16));
        assert_eq!(
            group(&vec![one(16); 8]).map(|all| all.matches.len()),
            Ok(128)
        );
        let field = "HTTPRouteGroup shop/g: spec.matches";
        let rejected = |matches: &[Value]| group(matches).unwrap_err().message;
        let expected = format!("{field}[0].methods: 17 entries are more than 16");
        assert_eq!(rejected(&[one(17)]), expected);
        let expected = format!("{field}: 144 entries are more than 128");
        assert_eq!(rejected(&vec![one(16); 64]), expected);
    }

    #[test]
    fn invalid_splits_do_not_disturb_others() {
        let weight = |weight: Value| json!({"service": "web", "backends": [{"service": "v1", "weight": weight}]});
        let kind =
            json!({"service": "web", "backends": [], "matches": [{"kind": "X", "name": "x"}]});
        let good = json!({"service": "web", "backends": backends()});
        let index = with([
            split("a", weight(json!(-1))),
            split("b", weight(json!(1.5))),
            split("c", weight(json!("500m"))),
            split("d", kind),
            split("e", json!({"service": "none", "backends": backends()})),
            split("good", good),
        ]);
        assert_eq!(table(&index, 80), ["-> shop/v1:80=90 shop/v2:80=10"]);
        let weight = |value| {
            format!(
                "UnsupportedValue spec.backends[0].weight: {value:?} is not an integer from 0 to 1000000"
            )
        };
        let expected = [
            weight("-1"),
            weight("1.5"),
            weight("\"500m\""),
            "UnsupportedValue spec.matches.kind: \"X\" is not HTTPRouteGroup".to_owned(),
            "NoMatchingParent the Service shop/none does not exist".to_owned(),
        ];
        assert_eq!(problems(&index), expected);
    }
}
