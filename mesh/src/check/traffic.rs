//! The check of the traffic: what failed at the proxies in the last minute, as they report it to the
//! controllers, or as the metrics of some of them show it while no controller responds. Pure, except
//! for reading these metrics.
//!
//! A report is the word of its own pod only, whatever the pod says. Namespaces take turns in what is
//! read and listed, so none displaces the others.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_proto::MAX_EXCEPTIONS;
use diy_mesh_proto::mesh::v1::exceptions::Exception;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt;

use super::facts::{Fact, Facts, admin_page};
use super::{Finding, Findings, Level, count, services};
use crate::cluster::Cluster;
use crate::identity::status::{Mesh, Workload, workload_name};
use crate::pods::{self, Pod};
use crate::turns::in_turns;

/// The proxies whose metrics are read.
const MAX_PROXIES: usize = 32;
/// The prefix of the gauges, and what follows it in the second one.
const METRIC: &str = "diy_mesh_proxy_exception";
const ATTEMPTS: &str = "_attempts";

/// A problem: at least this share of the requests fails, of so many.
const PROBLEM_PERCENT: u64 = 95;
const PROBLEM_REQUESTS: u64 = 10;
/// The same for a probe, which is performed a few times a minute.
const PROBLEM_PROBES: u64 = 3;
/// A warning: at least this share of the requests fails, and so many.
const WARNING_PERCENT: u64 = 5;
const WARNING_FAILURES: u64 = 3;
/// Failures that a route, a policy or the pod asks for.
const INTENDED: [&str; 3] = ["fault-injected", "rate-limited", "no-route"];

/// The failures at the proxies.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// The proxies that have reported, or were read, by `namespace/name` of the pod.
    pub proxies: BTreeMap<String, Vec<Exception>>,
    /// Exceptions that are not listed, for lack of room.
    pub omitted: u64,
    /// The number of proxies there are, if no controller responds.
    pub unreported: Option<usize>,
}

/// The metrics of a part of the proxies, by `namespace/name` of the pod.
pub(super) async fn pages(cluster: &Cluster, pods: &Fact<Vec<Pod>>) -> BTreeMap<String, String> {
    let ready = ready(pods.as_deref().unwrap_or_default());
    let ready = in_turns(ready.map(|pod| (pod.namespace().unwrap_or_default(), pod)));
    let read = async |pod: &Pod| {
        let page = admin_page(cluster, pod, "metrics").await.ok()?;
        Some((pods::name(pod), page))
    };
    let pages = join_all(ready.iter().take(MAX_PROXIES).map(|pod| read(pod))).await;
    pages.into_iter().flatten().collect()
}

fn ready(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods::meshed(pods).filter(|pod| pods::is_proxy_ready(pod))
}

impl Traffic {
    /// The reports of the proxies to the controllers, or the metrics of a part of the proxies.
    pub(super) fn read(
        identity: &Fact<Mesh>,
        pods: &Fact<Vec<Pod>>,
        pages: &BTreeMap<String, String>,
    ) -> Fact<Self> {
        if let Ok(mesh) = identity {
            return Ok(Self::reported(&mesh.workloads));
        }
        // Then it has not been asked.
        if let Err(reason) = identity
            && pages.is_empty()
            && super::is_intended(reason)
        {
            return Err(reason.clone());
        }
        let pods = pods.as_ref().map_err(Clone::clone)?;
        let pages = pages.iter();
        Ok(Self {
            proxies: pages
                .map(|(name, page)| (name.clone(), parse(page)))
                .collect(),
            omitted: 0,
            unreported: Some(ready(pods).count()),
        })
    }

    /// The reports of these workloads.
    fn reported(workloads: &[Workload]) -> Self {
        let mut traffic = Self::default();
        for workload in workloads {
            let report = workload.exceptions.clone().unwrap_or_default();
            let name = workload_name(workload);
            traffic.proxies.insert(name, report.exceptions);
            traffic.omitted += u64::from(report.omitted);
        }
        traffic
    }
}

/// The exceptions that the metrics of a proxy show.
fn parse(metrics: &str) -> Vec<Exception> {
    let mut found: BTreeMap<[String; 4], [u32; 2]> = BTreeMap::new();
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix(METRIC) else {
            continue;
        };
        let (rest, index) = match rest.strip_prefix(ATTEMPTS) {
            Some(rest) => (rest, 1),
            None => (rest.strip_prefix('s').unwrap_or(rest), 0),
        };
        let Some((labels, value)) = rest.strip_prefix('{').and_then(labels) else {
            continue;
        };
        if found.len() < MAX_EXCEPTIONS || found.contains_key(&labels) {
            found.entry(labels).or_default()[index] = value.trim().parse().unwrap_or(0);
        }
    }
    let exceptions = found.into_iter().map(|(labels, [count, total])| {
        let [kind, destination, endpoint, reason] = labels;
        Exception {
            kind,
            destination,
            endpoint,
            reason,
            count,
            total,
        }
    });
    exceptions.collect()
}

const LABELS: [&str; 4] = ["kind", "destination", "endpoint", "reason"];

/// The values of [`LABELS`], whatever their order, and what follows the labels.
fn labels(mut text: &str) -> Option<([String; 4], &str)> {
    let mut values: [Option<String>; 4] = Default::default();
    while !text.starts_with('}') {
        let (name, rest) = text.split_once("=\"")?;
        let mut chars = rest.chars();
        let mut value = String::new();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => value.push(match chars.next()? {
                    'n' => '\n',
                    other => other,
                }),
                other => value.push(other),
            }
        }
        if let Some(index) = LABELS.iter().position(|label| *label == name) {
            values[index] = Some(value);
        }
        text = chars.as_str().trim_start_matches([',', ' ']);
    }
    let [Some(kind), Some(destination), Some(endpoint), Some(reason)] = values else {
        return None;
    };
    Some(([kind, destination, endpoint, reason], &text[1..]))
}

/// The requests of applications and the kubelet's probes succeed.
pub(super) fn traffic(facts: &Facts) -> Findings<'_> {
    let traffic = facts.traffic.as_ref()?;
    let pods = facts.pods.as_deref().unwrap_or_default();
    let services = facts.services.as_deref().unwrap_or_default();
    Ok(findings(traffic, pods, services, facts.now))
}

/// The findings about the traffic between these pods and to these Services.
pub fn findings(traffic: &Traffic, pods: &[Pod], services: &[Service], now: u64) -> Vec<Finding> {
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    let mut groups: Vec<(Subject<'_>, Failures<'_>)> = grouped(traffic).into_iter().collect();
    groups.sort_by_key(|(_, failures)| std::cmp::Reverse(failures.count));
    for (subject, failures) in &groups {
        let details = match subject.level(failures, pods, now) {
            Some(Level::Problem) => &mut problems,
            Some(_) => &mut warnings,
            None => continue,
        };
        let detail = subject.describe(failures, pods, services);
        details.push((subject.namespace.to_owned(), detail));
    }
    let advice = "docs/troubleshooting.md describes each code; see the log of the proxy too: \
                  kubectl logs -n NAMESPACE POD -c proxy";
    let text = "nearly all requests to a destination, or all probes of a pod, fail";
    let problem = Finding::problem(text, advice).if_any(in_turns(problems));
    let text = "a part of the traffic fails, or avoids an endpoint";
    let mut warnings = in_turns(warnings);
    if traffic.omitted > 0 {
        let more = "more, which the reports of the proxies have no room for";
        warnings.push(format!("{} {more}", traffic.omitted));
    }
    let warning = Finding::warning(text, advice).if_any(warnings);
    let read = traffic.proxies.len();
    let partial = traffic.unreported.map(|all| {
        let text = format!(
            "no controller responds: {read} of {all} proxies were read, at most {MAX_PROXIES}"
        );
        Finding::warning(text, "")
    });
    let proxies = count(read, "proxy", "proxies");
    let text = format!("{proxies}: no failures above the ordinary in the last minute");
    super::or_ok([problem, warning, partial], text)
}

/// Failures of one kind at the pods of one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Subject<'a> {
    namespace: &'a str,
    kind: &'a str,
    destination: &'a str,
    endpoint: &'a str,
}

#[derive(Debug, Default)]
struct Failures<'a> {
    count: u64,
    /// The failures that no route, policy or pod asks for.
    unintended: u64,
    total: u64,
    reasons: BTreeMap<&'a str, u64>,
    pods: BTreeSet<&'a str>,
}

fn grouped(traffic: &Traffic) -> BTreeMap<Subject<'_>, Failures<'_>> {
    let mut groups: BTreeMap<Subject<'_>, Failures<'_>> = BTreeMap::new();
    for (pod, exceptions) in &traffic.proxies {
        for one in exceptions {
            let subject = Subject {
                namespace: pod.split('/').next().unwrap_or_default(),
                kind: &one.kind,
                destination: &one.destination,
                endpoint: &one.endpoint,
            };
            let failures = groups.entry(subject).or_default();
            let number = u64::from(one.count);
            failures.count += number;
            if !INTENDED.contains(&&*one.reason) {
                failures.unintended += number;
            }
            // Each of its reasons has the same total.
            if failures.pods.insert(pod) {
                failures.total += u64::from(one.total);
            }
            *failures.reasons.entry(&one.reason).or_default() += number;
        }
    }
    groups
}

impl Failures<'_> {
    fn all(&self) -> u64 {
        self.total.max(self.count)
    }

    /// The pods at which it fails.
    fn pods(&self) -> String {
        let first = self.pods.first().copied().unwrap_or_default();
        match self.pods.len() {
            0 | 1 => first.to_owned(),
            number => format!("{first} and {} more", number - 1),
        }
    }

    fn reasons(&self) -> String {
        let mut reasons: Vec<_> = self.reasons.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let one = |(reason, count): &(&&str, &u64)| match self.reasons.len() {
            1 => (**reason).to_owned(),
            _ => format!("{reason} ({count})"),
        };
        let reasons: Vec<String> = reasons.iter().map(one).collect();
        reasons.join(", ")
    }
}

impl Subject<'_> {
    /// `None` for what is ordinary. Callers alone decide what fails at the pod, and what is outside
    /// the mesh may be so: these are never problems.
    fn level(&self, failures: &Failures<'_>, pods: &[Pod], now: u64) -> Option<Level> {
        let exceeds = |number: u64, percent: u64| number * 100 >= percent * failures.all();
        let problem_from = match self.kind {
            "circuit-open" => return Some(Level::Problem),
            "ejected" => return Some(Level::Warning),
            // An application that starts is not ready yet.
            "probe" if failures.pods.iter().all(|name| is_young(name, pods, now)) => return None,
            "probe" => PROBLEM_PROBES,
            "requests" if self.destination != "other" => PROBLEM_REQUESTS,
            "requests" | "addresses" | "inbound" => u64::MAX,
            // A kind of a later release.
            _ => return None,
        };
        let unintended = failures.unintended;
        if unintended >= problem_from && exceeds(unintended, PROBLEM_PERCENT) {
            return Some(Level::Problem);
        }
        let is_warning =
            failures.count >= WARNING_FAILURES && exceeds(failures.count, WARNING_PERCENT);
        is_warning.then_some(Level::Warning)
    }

    fn describe(&self, failures: &Failures<'_>, all: &[Pod], services: &[Service]) -> String {
        let (pods, reasons, destination) = (failures.pods(), failures.reasons(), self.destination);
        let total = failures.all();
        let percent = failures.count * 100 / total.max(1);
        match self.kind {
            "ejected" => {
                let endpoint = match pod_at(self.endpoint, all) {
                    Some(name) => format!("{} ({name})", self.endpoint),
                    None => self.endpoint.to_owned(),
                };
                let cause = cause(&reasons);
                format!("{pods}: requests to {destination} avoid {endpoint}: {cause}")
            }
            "circuit-open" => {
                format!("{pods}: the circuit of {destination} is open, by {reasons}")
            }
            "probe" => {
                let count = failures.count;
                format!("{pods}: {count} of {total} probes failed, {destination}: {reasons}")
            }
            _ if destination == "other" => {
                let count = failures.count;
                format!("{pods}: {count} requests to further destinations failed")
            }
            kind => {
                let to = match kind {
                    "inbound" => "from its callers".to_owned(),
                    _ if destination.is_empty() => "of its application".to_owned(),
                    _ => format!("to {destination}"),
                };
                let hint = services::target_port_hint(destination, services, all);
                let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
                format!("{pods}: {percent}% of {total} requests {to} failed: {reasons}{hint}")
            }
        }
    }
}

fn is_young(name: &str, pods: &[Pod], now: u64) -> bool {
    let pod = pods.iter().find(|pod| pods::name(*pod) == name);
    pod.is_some_and(|pod| pods::age(pod, now) <= pods::READY_TIMEOUT)
}

/// The pod at an address and port.
fn pod_at(endpoint: &str, pods: &[Pod]) -> Option<String> {
    let ip = endpoint.parse::<std::net::SocketAddr>().ok()?.ip();
    let has_ip = |pod: &&Pod| {
        let own = pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip.as_ref());
        own.is_some_and(|own| own.parse() == Ok(ip))
    };
    let pod = pods.iter().filter(|pod| pods::is_active(pod)).find(has_ip);
    pod.map(pods::name)
}

/// The cause of an ejection, in words.
fn cause(name: &str) -> &str {
    match name {
        "refused" => "it accepts no connections",
        "consecutive" => "it failed several requests in a row",
        "percent" => "it fails a large share of its requests",
        "latency" => "it is much slower than the others",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::facts::testing::{NOW, meshed, object, ready, unknown_facts};
    use super::*;

    fn exception(kind: &str, destination: &str, reason: &str, count: u32, total: u32) -> Exception {
        Exception {
            kind: kind.into(),
            destination: destination.into(),
            reason: reason.into(),
            count,
            total,
            ..Exception::default()
        }
    }

    fn requests(reason: &str, count: u32, total: u32) -> Exception {
        exception("requests", "shop/cart:80", reason, count, total)
    }

    fn traffic(proxies: &[(&str, Vec<Exception>)]) -> Traffic {
        let proxies = proxies.iter();
        Traffic {
            proxies: proxies
                .map(|(name, all)| ((*name).to_owned(), all.clone()))
                .collect(),
            ..Traffic::default()
        }
    }

    /// The level and the details of each finding about these exceptions of pod shop/web.
    fn found(exceptions: Vec<Exception>) -> Vec<(Level, Vec<String>)> {
        let findings = findings(&traffic(&[("shop/web", exceptions)]), &[], &[], NOW);
        let found = findings.into_iter();
        found.map(|one| (one.level, one.details)).collect()
    }

    /// The level of the only finding.
    fn level(exception: Exception) -> Level {
        let found = found(vec![exception]);
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].0
    }

    #[test]
    fn names_what_fails_where_and_the_ports_that_pods_have() {
        let mut cart = meshed("cart-1", ready());
        cart.metadata.labels = Some([("app".to_owned(), "cart".to_owned())].into());
        cart.spec.as_mut().unwrap().containers = Some(vec![object(
            json!({"name": "cart", "ports": [{"containerPort": 8080}]}),
        )]);
        cart.status.as_mut().unwrap().pod_ip = Some("10.1.0.7".into());
        let service = object(json!({
            "metadata": {"namespace": "shop", "name": "cart"},
            "spec": {"selector": {"app": "cart"}, "ports": [{"port": 80, "targetPort": 8081}]},
        }));
        let ejected = Exception {
            endpoint: "10.1.0.7:8081".into(),
            ..exception("ejected", "shop/cart:80", "consecutive", 3, 0)
        };
        let open = exception(
            "circuit-open",
            "shop/cart:80",
            "TrafficPolicy shop/cart",
            2,
            0,
        );
        let probe = exception(
            "probe",
            "HTTP GET /healthz on port 8080",
            "status-429",
            6,
            6,
        );
        let facts = Facts {
            pods: Ok(vec![cart, meshed("web", ready())]),
            services: Ok(vec![service]),
            traffic: Ok(traffic(&[
                (
                    "shop/web",
                    vec![requests("connect-failed", 240, 240), ejected, open],
                ),
                ("shop/cart-1", vec![probe]),
            ])),
            ..unknown_facts()
        };
        let findings = super::traffic(&facts).unwrap();
        let levels: Vec<Level> = findings.iter().map(|one| one.level).collect();
        assert_eq!(levels, [Level::Problem, Level::Warning]);
        let expected = [
            "shop/web: 100% of 240 requests to shop/cart:80 failed: connect-failed; targetPort \
             8081, its pods have 8080",
            "shop/cart-1: 6 of 6 probes failed, HTTP GET /healthz on port 8080: status-429",
            "shop/web: the circuit of shop/cart:80 is open, by TrafficPolicy shop/cart",
        ];
        assert_eq!(findings[0].details, expected);
        let expected = "shop/web: requests to shop/cart:80 avoid 10.1.0.7:8081 (shop/cart-1): it \
                        failed several requests in a row";
        assert_eq!(findings[1].details, [expected]);
    }

    #[test]
    fn adds_up_the_pods_of_a_namespace_and_the_reasons() {
        let both = || {
            vec![
                requests("timeout", 30, 100),
                requests("connect-failed", 70, 100),
            ]
        };
        let traffic = traffic(&[("shop/a", both()), ("shop/b", both()), ("x/c", both())]);
        let findings = findings(&traffic, &[], &[], NOW);
        let line = |pods: &str, total: u32, reasons: &str| {
            format!("{pods}: 100% of {total} requests to shop/cart:80 failed: {reasons}")
        };
        let expected = [
            line(
                "shop/a and 1 more",
                200,
                "connect-failed (140), timeout (60)",
            ),
            line("x/c", 100, "connect-failed (70), timeout (30)"),
        ];
        assert_eq!(
            (findings[0].level, &*findings[0].details),
            (Level::Problem, &expected[..])
        );
    }

    #[test]
    fn ordinary_failures_are_no_finding_and_few_are_no_problem() {
        for (count, total, expected) in [
            (2, 2, Level::Ok),
            (4, 100, Level::Ok),
            (3, 3, Level::Warning),
            (5, 100, Level::Warning),
            (94, 100, Level::Warning),
            (95, 100, Level::Problem),
            (10, 10, Level::Problem),
            // The requests of the last seconds are not counted yet.
            (20, 3, Level::Problem),
        ] {
            assert_eq!(
                level(requests("timeout", count, total)),
                expected,
                "{count} of {total}"
            );
        }
        for exception in [
            requests("fault-injected", 100, 100),
            exception("addresses", "192.0.2.1:80", "connect-failed", 100, 100),
            exception("inbound", "", "mtls-required", 100, 100),
            exception("requests", "other", "", 100, 0),
        ] {
            assert_eq!(level(exception), Level::Warning);
        }
        assert_eq!(
            level(exception("probe", "x", "timeout", 3, 3)),
            Level::Problem
        );
        assert_eq!(
            level(exception("probe", "x", "timeout", 3, 4)),
            Level::Warning
        );
        assert_eq!(
            level(exception("of-a-later-release", "x", "y", 9, 9)),
            Level::Ok
        );
    }

    #[test]
    fn probes_of_a_pod_that_starts_are_no_finding() {
        let mut pod = meshed("web", ready());
        pod.metadata.creation_timestamp = None;
        let failed = exception("probe", "x", "connect-failed", 30, 30);
        let traffic = traffic(&[("shop/web", vec![failed])]);
        assert_eq!(findings(&traffic, &[pod], &[], NOW)[0].level, Level::Ok);
        assert_eq!(findings(&traffic, &[], &[], NOW)[0].level, Level::Problem);
    }

    #[test]
    fn proxies_of_a_hostile_namespace_displace_no_other_and_write_no_control_characters() {
        let hostile = Workload {
            namespace: "evil".into(),
            pod: "pod".into(),
            exceptions: Some(diy_mesh_proto::mesh::v1::Exceptions {
                exceptions: (0..64)
                    .map(|number| {
                        let destination = format!("\u{1b}[2Jbank/db-{number}:80\n");
                        exception("requests", &destination, "timeout", u32::MAX, 0)
                    })
                    .collect(),
                omitted: u32::MAX,
            }),
            ..Workload::default()
        };
        let mut traffic = Traffic::reported(&[hostile]);
        let web = traffic.proxies.entry("shop/web".into()).or_default();
        web.push(requests("connect-failed", 10, 10));
        let findings = findings(&traffic, &[], &[], NOW);
        let details = &findings[0].details;
        assert!(
            details[1].starts_with("shop/web: 100% of 10 "),
            "{details:?}"
        );
        assert!(details[0].starts_with("evil/pod: 100% of 4294967295 requests to \\x1b[2Jbank/db"));
        assert!(details.iter().all(|one| !one.contains(char::is_control)));
    }

    #[test]
    fn says_how_many_proxies_were_read() {
        let mut traffic = traffic(&[("shop/web", Vec::new())]);
        assert_eq!(
            findings(&traffic, &[], &[], NOW)[0].text,
            "1 proxy: no failures above the ordinary in the last minute"
        );
        traffic.unreported = Some(40);
        let finding = findings(&traffic, &[], &[], NOW).remove(0);
        assert_eq!(
            (finding.level, &*finding.text),
            (
                Level::Warning,
                "no controller responds: 1 of 40 proxies were read, at most 32"
            )
        );
    }

    #[test]
    fn reads_exceptions_from_metrics() {
        let page = r#"# HELP diy_mesh_proxy_exceptions Failures.
diy_mesh_proxy_exceptions{kind="probe",destination="HTTP GET /\"a\\ on port 80",endpoint="",reason="timeout"} 3
diy_mesh_proxy_exceptions{kind="ejected",destination="shop/cart:80",endpoint="[fd00::7]:80",reason="refused"} 2
diy_mesh_proxy_exceptions{kind="ejected"} 2
diy_mesh_proxy_exception_attempts{endpoint="", kind="probe",pod="web",reason="timeout",destination="HTTP GET /\"a\\ on port 80"} 4
diy_mesh_proxy_exceptions_open 3
diy_mesh_proxy_requests_total{direction="inbound"} 2
"#;
        let ejected = Exception {
            endpoint: "[fd00::7]:80".into(),
            ..exception("ejected", "shop/cart:80", "refused", 2, 0)
        };
        let probe = exception("probe", "HTTP GET /\"a\\ on port 80", "timeout", 3, 4);
        assert_eq!(parse(page), [ejected, probe]);
        let many: String = (0..1000)
            .map(|number| {
                format!(
                    "{METRIC}s{{kind=\"x\",destination=\"{number}\",endpoint=\"\",reason=\"\"}} 1\n"
                )
            })
            .collect();
        assert_eq!(parse(&many).len(), MAX_EXCEPTIONS);
    }

    #[test]
    fn namespaces_take_turns() {
        let items = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6)];
        let items = items.map(|(namespace, item)| (namespace.to_owned(), item));
        assert_eq!(in_turns(items), [1, 4, 5, 2, 6, 3]);
    }

    /// A cluster whose API server serves the metrics of all proxies: one exception that names the
    /// path. The page of namespace `evil` has it beyond its limit.
    fn cluster() -> Cluster {
        let service = tower::service_fn(|request: hyper::Request<kube::client::Body>| async move {
            let path = request.uri().path().to_owned();
            let labels = format!(
                "kind=\"requests\",destination=\"{path}\",endpoint=\"\",reason=\"timeout\""
            );
            let mut page = if path.contains("/evil/") {
                " ".repeat(1024 * 1024)
            } else {
                String::new()
            };
            page += &format!("\n{METRIC}s{{{labels}}} 3\n");
            hyper::Response::builder().body(kube::client::Body::from(page.into_bytes()))
        });
        Cluster {
            client: kube::Client::new(service, "default"),
            mesh_namespace: "service-mesh".into(),
            version: unknown_facts().version,
        }
    }

    #[tokio::test]
    async fn reads_some_proxies_of_each_namespace_while_no_controller_responds() {
        let mut pods: Vec<Pod> = (0..40)
            .map(|number| meshed(&format!("web-{number}"), ready()))
            .collect();
        for namespace in ["evil", "zoo"] {
            let mut pod = meshed("pod", ready());
            pod.metadata.namespace = Some(namespace.into());
            pods.push(pod);
        }
        let identity = Err("no controller responds".to_owned());
        let pods = Ok(pods);
        let pages = pages(&cluster(), &pods).await;
        let traffic = Traffic::read(&identity, &pods, &pages).unwrap();
        assert_eq!(
            (traffic.proxies.len(), traffic.unreported),
            (MAX_PROXIES, Some(42))
        );
        let path = "/api/v1/namespaces/zoo/pods/pod:4001/proxy/metrics";
        let expected = exception("requests", path, "timeout", 3, 0);
        assert_eq!(traffic.proxies["zoo/pod"], [expected]);
        assert_eq!(traffic.proxies["evil/pod"], []);
    }

    #[test]
    fn traffic_is_unknown_if_neither_controllers_nor_proxies_may_be_asked() {
        let pods = Ok(vec![meshed("web", ready())]);
        let forbidden = Err("no token: forbidden: not for alice".to_owned());
        let mut pages = BTreeMap::new();
        let traffic = |pages: &_| Traffic::read(&forbidden, &pods, pages);
        assert!(traffic(&pages).is_err());
        pages.insert("shop/web".to_owned(), String::new());
        assert_eq!(traffic(&pages).unwrap().unreported, Some(1));
    }
}
